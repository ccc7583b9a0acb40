"""What a draft would be worth in the server, from dumped states alone: accuracy per step, and the acceptance length it implies.

Step 1 at token i reads the target's state of i and the token i+1, and guesses i+2. Step k goes on from the draft's own state of
step k-1, sees the target's states up to i and its own after that, and, as long as all guesses were right, the tokens of the text.
All anchors i are computed at once. The acceptance length is then walked out as the server does it with a chain: from the prompt's
end, accept the guesses that agree, add the target's one token, go on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import draft_model, torch_io
from sglang_eagle3_plugin.hidden_states.draft_model import Draft
from sglang_eagle3_plugin.hidden_states.training import States


@dataclass(frozen=True)
class Score:
    """How good a draft is.

    Attributes:
        sequences: that were scored.
        anchors: tokens from which a first guess was made, where the loss counts.
        top1: share of right guesses at each step, all earlier tokens being right.
        topk: share of steps whose right token is among the k best.
        k: of ``topk``.
        acceptance_length: tokens a verification, the target's own included, for a chain of ``len(top1)`` steps.
        greedy_share: share of the text that the target itself would say greedily; None without --target. Where it is low, the
            acceptance length is of this text, not of what the server will write.
    """

    sequences: int
    anchors: int
    top1: tuple[float, ...]
    topk: tuple[float, ...]
    k: int
    acceptance_length: float
    greedy_share: float | None


def score(
    directory: Path,
    data: Iterable[States],
    target: Path | None = None,
    *,
    steps: int = 3,
    k: int = 4,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> Score:
    """Score a draft.

    Args:
        directory: of the draft.
        data: sequences with auxiliary states in the draft's order.
        target: directory of the target; lends embedding and head as SGLang does, and says what it would have said.
        steps: ``speculative_num_steps``.
        k: guesses a step that ``topk`` counts.

    Raises:
        UserError: no torch, an unknown draft, or data that does not fit it.
    """
    torch = torch_io.import_torch("score")
    draft = draft_model.load(directory, target, device)
    head = draft_model.load_head(target, device) if target else None
    totals = _Totals(steps)
    with torch.inference_mode():
        for states in data:
            if states.tokens is None:
                raise UserError(f"{states.origin} has no token ids, so there is nothing to guess")
            if len(states.tokens) >= 3:
                totals.add(*_guesses(draft, states, head, steps, k, device))
                progress(totals.sequences)
    if not totals.anchors:
        raise UserError("the data has no sequence of three tokens or more where the loss counts")
    return totals.score(k)


def _guesses(draft: Draft, states: States, head: Any, steps: int, k: int, device: str) -> tuple[Any, Any, Any, Any]:
    """For one sequence: (hits, hits within k, greedy, counted), of shapes (steps, A), (steps, A), (A,) or None, (A,); A anchors."""
    torch = torch_io.import_torch("score")
    tokens = torch.tensor(states.tokens, device=device)
    aux = torch.stack([torch.tensor(rows, device=device) for rows in states.slots.values()], dim=1)
    anchors = len(tokens) - 2
    labels = tokens
    greedy = None
    if head is not None and (final := _head_input(states)) is not None:
        said = (torch.tensor(final, device=device) @ head.T).argmax(-1)
        labels = torch.cat([tokens[:1], said[:-1]])  # what the target says for token j, having read those before
        greedy = labels == tokens
    else:
        labels = tokens
    hidden = draft.project(aux[:-2])
    positions = torch.arange(anchors, device=device)
    causal = positions[None, :] <= positions[:, None]
    query, first_keys, first_values = draft.queries_keys_values(tokens[1:-1], hidden, positions)
    own_keys: list[Any] = []
    own_values: list[Any] = []
    hits = torch.zeros((steps, anchors), dtype=torch.bool, device=device)
    close = torch.zeros_like(hits)
    for step in range(steps):
        inside = positions + step + 2 < len(tokens)
        if step:
            here = tokens[(positions + step + 1).clamp(max=len(tokens) - 1)]
            query, key, value = draft.queries_keys_values(here, hidden, positions + step)
            own_keys.append(key)
            own_values.append(value)
        scores = torch.einsum("qhd,khd->qhk", query, first_keys).masked_fill(~causal[:, None], float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in own_keys]
        weights = (torch.cat([scores, *own], dim=-1) * draft.scale).softmax(-1)
        attended = torch.einsum("qhk,khd->qhd", weights[..., :anchors], first_values)
        for i, value in enumerate(own_values):
            attended = attended + weights[..., anchors + i, None] * value
        hidden, logits = draft.finish(hidden, attended)
        best = draft.to_target[logits.topk(min(k, logits.shape[-1]), dim=-1).indices]
        right = labels[(positions + step + 2).clamp(max=len(tokens) - 1)]
        hits[step] = (best[:, 0] == right) & inside
        close[step] = (best == right[:, None]).any(-1) & inside
    mask = torch.tensor(states.loss_mask, device=device)[1:-1].bool()  # the first generated token comes from the prefill
    return hits, close, greedy, mask


def _head_input(states: States) -> Any:
    """The final state that ``lm_head`` reads: after the norm."""
    return states.finals.get("post-norm", states.finals.get("final"))


class _Totals:
    def __init__(self, steps: int) -> None:
        self.sequences = self.anchors = 0
        self.hits, self.close, self.tried = [0] * steps, [0] * steps, [0] * steps
        self.accepted = self.verifications = 0
        self.greedy = self.greedy_of = 0

    def add(self, hits: Any, close: Any, greedy: Any, mask: Any) -> None:
        self.sequences += 1
        self.anchors += int(mask.sum())
        length = hits.shape[1]
        for step in range(len(self.hits)):
            counted = mask.clone()
            counted[max(0, length - step) :] = False  # their guess would lie beyond the end
            self.hits[step] += int((hits[step] & counted).sum())
            self.close[step] += int((close[step] & counted).sum())
            self.tried[step] += int(counted.sum())
        if greedy is not None:
            self.greedy += int(greedy[2:][mask].sum())
            self.greedy_of += int(mask.sum())
        self._walk(hits.cpu(), mask.cpu(), None if greedy is None else greedy[2:].cpu())

    def _walk(self, hits: Any, mask: Any, greedy: Any) -> None:
        """The server's way through the text; only rounds whose whole chain lies inside the text count."""
        steps, length = hits.shape
        at = 0
        while at + steps <= length:
            right = 0
            while right < steps and hits[right, at] and (greedy is None or greedy[at + right]):
                right += 1
            if mask[at]:
                self.accepted += right + 1
                self.verifications += 1
            at += right + 1 if mask[at] else 1

    def score(self, k: int) -> Score:
        def shares(counts: list[int]) -> tuple[float, ...]:
            return tuple(count / tried if tried else 0.0 for count, tried in zip(counts, self.tried, strict=True))

        return Score(
            sequences=self.sequences,
            anchors=self.anchors,
            top1=shares(self.hits),
            topk=shares(self.close),
            k=k,
            acceptance_length=self.accepted / self.verifications if self.verifications else 1.0,
            greedy_share=self.greedy / self.greedy_of if self.greedy_of else None,
        )
