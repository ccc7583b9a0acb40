"""Tiny targets whose layers say which boundary a state is, and drafts that answer only to the boundaries they were made for.

Everything is laid out by hand in the channels of the residual stream, so that what must come out is known beforehand:

- A token t is a pair (a, b) of digits, t = 16 a + b. The target continues ``.. (a', b') (a, b)`` with :func:`next_token`, which
  needs b from the last token and a' from the one before it, fetched by attention. So a wrong tree mask, position or KV slot
  shows as a wrong token.
- Layer i writes a fixed value into channel ``Labels.first + i`` and nothing else does: the boundary of a captured state is the
  number of marked channels, 0 for the embeddings and L after the last layer.
- A labelled draft knows the same rule and predicts every token right, if each slot of its ``fc`` carries exactly the boundary it
  was made for; otherwise it only says tokens that the target never says. Acceptance length is then num_steps + 1, or 1.
- The other channels carry small random noise through every head, expert and MLP.

Weights are float32; needs numpy and safetensors, not torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sglang_eagle3_plugin.boundaries import Convention
from sglang_eagle3_plugin.rig import kimi
from sglang_eagle3_plugin.rig.attention import Gqa, Mla, Reads, Weights, Writes

DIGITS = 16
TOKENS = DIGITS * DIGITS
"""Tokens that a target says and a prompt may hold: 0 to 255."""
VOCABULARY = 320
"""Ids from 256 on are never said by a target. A miswired draft says nothing else, and the special tokens lie there too."""

# Channels of the residual stream, in targets and (up to the labels) in drafts.
CONST, A, B, PREVIOUS_A, LABELS, NOISE = 0, 1, 17, 33, 49, 96
MAX_LAYERS = NOISE - LABELS
DIGIT_SIZE, CONST_SIZE, LABEL_SIZE = 4.0, 16.0, 2.0
# In a draft the constant outweighs all else, so that normalising divides by nearly the same number whatever the digits are.
DRAFT_CONST_SIZE = 100.0
DRAFT_ERROR = LABELS
"""Draft channel that is 0 when the wiring is right. Where a target has layer 0's label: raw target states look miswired."""


def next_token(before: int, last: int) -> int:
    """The rule of every target: the token after ``.. before last``. A first token counts as its own predecessor."""
    return DIGITS * ((5 * (last % DIGITS) + 3) % DIGITS) + (3 * (before // DIGITS) + 7) % DIGITS


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens after a prompt, by the rule."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-2] if len(tokens) > 1 else tokens[-1], tokens[-1]))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Labels:
    """Where a target marks its layers: layer i writes ``value`` into channel ``first + i`` of ``hidden_size``, i < ``count``."""

    hidden_size: int
    first: int
    count: int
    value: float


@dataclass(frozen=True)
class Target:
    """A target on disk."""

    path: Path
    family: str
    layers: int
    hidden_size: int

    @property
    def labels(self) -> Labels:
        """Where its layers' labels are."""
        return Labels(self.hidden_size, LABELS, self.layers, LABEL_SIZE)


def labels_of(directory: Path) -> Labels | None:
    """The labels of a target that :func:`target` wrote, read from its directory; None for any other model."""
    try:
        return Labels(**json.loads((directory / "labels.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


FAMILIES = ("llama", "kimi-k25", "qwen3-moe")
DRAFT_KINDS = ("labelled", "unsure", "random")
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 301,
    "eos_token_id": 302,
    "pad_token_id": 303,
    "torch_dtype": "float32",
}


def target(directory: Path, family: str = "llama", layers: int = 8, seed: int = 0) -> Target:
    """Write a target: config.json, model.safetensors and labels.json.

    Args:
        directory: made if missing; the three files are overwritten.
        family: one of :data:`FAMILIES`: LlamaForCausalLM, KimiK25ForConditionalGeneration (MLA and MoE), Qwen3MoeForCausalLM; or
            ``kimi-k25-full``, of Kimi-K2.5's own widths, of which a layer holds 0.8e9 parameters.
        layers: decoder layers, up to :data:`MAX_LAYERS`.
        seed: of the noise.

    Raises:
        ValueError: an unknown family, or too many layers.
    """
    if family not in {*FAMILIES, *kimi.KINDS} or not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"no target of family {family!r} with {layers} layers; families: {', '.join(FAMILIES)}")
    sizes = kimi.KINDS.get(family)
    weights = Weights(seed, sizes.noise, sizes.dtype) if sizes else Weights(seed)
    hidden = sizes.hidden if sizes else 256
    prefix = "language_model." if sizes else ""
    attention: Gqa | Mla = sizes.attention if sizes else Gqa(qk_norm=family == "qwen3-moe")

    embedding = np.zeros((VOCABULARY, hidden), np.float32)
    embedding[:, CONST] = CONST_SIZE
    tokens = np.arange(VOCABULARY)
    embedding[tokens, A + tokens // DIGITS % DIGITS] = DIGIT_SIZE
    embedding[tokens, B + tokens % DIGITS] = DIGIT_SIZE
    weights[f"{prefix}model.embed_tokens.weight"] = embedding
    weights[f"{prefix}model.norm.weight"] = np.ones(hidden, np.float32)
    weights[f"{prefix}lm_head.weight"] = _head(hidden, 3.0)
    for i in range(layers):
        name = f"{prefix}model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = np.ones(hidden, np.float32)
        digits = 3 if i else 2  # the previous token's digit is there once layer 0 has fetched it
        gain = _gain(hidden, CONST_SIZE, DIGIT_SIZE**2 * digits + LABEL_SIZE**2 * i)
        carried = DIGITS + 1
        reads = Reads(width=hidden, const=CONST, const_value=CONST_SIZE * gain, values=np.zeros((carried, hidden), np.float32))
        reads.values[range(DIGITS), range(A, A + DIGITS)] = 1 / gain
        reads.values[DIGITS, CONST] = 1 / gain
        writes = Writes(np.zeros((hidden, carried), np.float32), noise_from=NOISE)
        writes.matrix[LABELS + i, DIGITS] = LABEL_SIZE / CONST_SIZE
        if i == 0:
            writes.matrix[range(PREVIOUS_A, PREVIOUS_A + DIGITS), range(DIGITS)] = 1
        # The value's norm is known: one digit and the constant.
        attention.write(weights, f"{name}self_attn.", reads, writes, offset=1, value_norm=math.hypot(DIGIT_SIZE, CONST_SIZE))
        _feed_forward(weights, f"{name}mlp.", family, i, hidden)
    config = _target_config(family, layers, hidden)
    made = Target(directory, family, layers, hidden)
    _save(directory, config, weights)
    (directory / "labels.json").write_text(json.dumps(asdict(made.labels)), encoding="utf-8")
    return made


def draft(
    directory: Path,
    target: Target,
    boundaries: Sequence[int] = (2, 4, 5),
    *,
    kind: str = "labelled",
    ids: Sequence[int] | None = None,
    convention: str | None = None,
    mla: bool = False,
    seed: int = 1,
) -> Path:
    """Write an EAGLE-3 draft for a target and return its directory.

    Args:
        directory: made if missing; config.json and model.safetensors are overwritten.
        target: whose states it takes.
        boundaries: what it was made for, ascending; two or more, or one for a random draft (SGLang
            skips ``fc`` when a single slot has the draft's width, so no draft can answer by it).
        kind: one of :data:`DRAFT_KINDS`: ``labelled`` (right only when wired to ``boundaries``); ``unsure`` (labelled,
            but the right token is its second choice after every token with an even second digit: trees accept what chains can't);
            ``random`` (accepted by accident only).
        ids: what the config lists; by default the boundaries in ``convention`` (``output`` if None). ``()`` lists none.
        convention: ``output`` or ``boundary``, written as ``eagle_config.eagle_aux_hidden_state_layer_convention``; None: not said.
        mla: Eagle3DeepseekV2ForCausalLM (releases from 0.5.12) in place of LlamaForCausalLMEagle3.
        seed: of the noise.

    Raises:
        ValueError: an unknown kind or convention, fewer than two boundaries, or one that the target hasn't got.
    """
    if kind not in DRAFT_KINDS:
        raise ValueError(f"no draft of kind {kind!r}; kinds: {', '.join(DRAFT_KINDS)}")
    fewest = 1 if kind == "random" else 2
    if len(boundaries) < fewest or not all(0 <= k <= target.layers for k in boundaries):
        raise ValueError(f"a {kind} draft needs {fewest} or more boundaries in 0..{target.layers}, not {list(boundaries)}")
    listed = Convention(convention or "output").to_ids(boundaries) if ids is None else tuple(ids)
    hidden = target.hidden_size
    weights = Weights(seed)
    attention: Gqa | Mla = Mla() if mla else Gqa(heads=2, kv_heads=2)
    for norm in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
        weights[f"{norm}.weight"] = np.ones(hidden, np.float32)
    weights["d2t"] = np.zeros(VOCABULARY, np.int64)
    weights["t2d"] = np.ones(VOCABULARY, np.bool_)
    weights.swiglu("midlayer.mlp.", hidden, _draft_config(target, (), (), None, mla)["intermediate_size"], hidden)
    if kind == "random":
        weights.noise("fc.weight", hidden, len(boundaries) * hidden)
        weights.noise("lm_head.weight", VOCABULARY, hidden)
        attention.write_noise(weights, "midlayer.self_attn.", 2 * hidden, hidden)
    else:
        weights["fc.weight"] = _checking_fc(boundaries, target)
        head = _head(hidden, 16.0)
        if kind == "unsure":  # a little more for the token whose first digit is one too high
            even = slice(B, B + DIGITS, 2)
            head[:TOKENS, even] += 1.1 * np.roll(head[:TOKENS, even], DIGITS, axis=0)
        head[TOKENS:, DRAFT_ERROR] = 400.0  # all of them, so that a wide tree holds no right token
        weights["lm_head.weight"] = head
        reads, writes = _draft_reads_and_writes(hidden)
        # The constant travels with the values so that an MLA draft's latent norm is known too.
        attention.write(weights, "midlayer.self_attn.", reads, writes, offset=0, value_norm=DRAFT_CONST_SIZE)
    _save(directory, _draft_config(target, boundaries, listed, convention, mla), weights)
    return directory


def _checking_fc(boundaries: Sequence[int], target: Target) -> Any:
    """Project the slots to the draft's stream: what it needs of the last token, and all that is wrong with the labels, summed."""
    hidden = target.hidden_size
    fc = np.zeros((hidden, len(boundaries), hidden), np.float32)
    fc[CONST, 0, CONST] = DRAFT_CONST_SIZE / CONST_SIZE
    fc[range(A, A + DIGITS), 0, range(A, A + DIGITS)] = 1
    for slot, boundary in enumerate(boundaries):
        if boundary < target.layers:  # a later boundary has this label
            fc[DRAFT_ERROR, slot, LABELS + boundary] += 1 / LABEL_SIZE
        if boundary > 0:  # an earlier one lacks that label
            fc[DRAFT_ERROR, slot, CONST] += 1 / CONST_SIZE
            fc[DRAFT_ERROR, slot, LABELS + boundary - 1] -= 1 / LABEL_SIZE
    return fc.reshape(hidden, -1)


def _draft_reads_and_writes(hidden: int) -> tuple[Reads, Writes]:
    """One step of the draft's stream: its digits become "previous", and those of the embedded token take their place.

    Input of its attention is the normalised embedding (channels 0..hidden) and the normalised stream (hidden..2 hidden).
    """
    embedding = _gain(hidden, CONST_SIZE, 2 * DIGIT_SIZE**2)
    stream = _gain(hidden, DRAFT_CONST_SIZE, 2 * DIGIT_SIZE**2)
    carried = 3 * DIGITS + 1
    values = np.zeros((carried, 2 * hidden), np.float32)
    matrix = np.zeros((hidden, carried), np.float32)
    for digit in range(DIGITS):
        new_a, new_b, moved = digit, DIGITS + digit, 2 * DIGITS + digit
        values[new_a, A + digit] = values[new_b, B + digit] = 1 / embedding
        values[new_a, hidden + A + digit] = values[new_b, hidden + B + digit] = -1 / stream
        values[moved, hidden + A + digit] = 1 / stream
        values[moved, hidden + PREVIOUS_A + digit] = -1 / stream
        matrix[A + digit, new_a] = matrix[B + digit, new_b] = matrix[PREVIOUS_A + digit, moved] = 1
    values[-1, CONST] = DRAFT_CONST_SIZE / CONST_SIZE / embedding
    return Reads(2 * hidden, CONST, CONST_SIZE * embedding, values), Writes(matrix, noise_from=None)


def _head(hidden: int, size: float) -> Any:
    """Score each token by the rule: one hit for its first digit, one for its second."""
    head = np.zeros((VOCABULARY, hidden), np.float32)
    for token in range(TOKENS):
        for digit in range(DIGITS):
            if next_token(0, digit) // DIGITS == token // DIGITS:
                head[token, B + digit] = size
            if next_token(DIGITS * digit, 0) % DIGITS == token % DIGITS:
                head[token, PREVIOUS_A + digit] = size
    return head


def _gain(width: int, const: float, other_squares: float) -> float:
    """What RMSNorm multiplies a stream by whose channels' squares sum to const^2 + other_squares."""
    return math.sqrt(width / (const**2 + other_squares))


def _feed_forward(weights: Weights, name: str, family: str, layer: int, hidden: int) -> None:
    if family == "llama":
        return weights.swiglu(name, hidden, 2 * hidden, hidden, NOISE)
    sizes = kimi.KINDS.get(family)
    if sizes and layer == 0:
        return weights.swiglu(name, hidden, sizes.dense, hidden, NOISE)
    experts, inner = (sizes.experts, sizes.expert) if sizes else (4, 64)
    weights.noise(f"{name}gate.weight", experts, hidden)
    for expert in range(experts):
        weights.swiglu(f"{name}experts.{expert}.", hidden, inner, hidden, NOISE)
    if sizes:
        weights[f"{name}gate.e_score_correction_bias"] = np.zeros(experts, np.float32)
        weights.swiglu(f"{name}shared_experts.", hidden, inner, hidden, NOISE)
    return None


def _target_config(family: str, layers: int, hidden: int) -> dict[str, Any]:
    base = {**_COMMON, "hidden_size": hidden, "num_hidden_layers": layers}
    if family == "llama":
        return {
            **base,
            **Gqa().config(),
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": 2 * hidden,
            "mlp_bias": False,
        }
    if family == "qwen3-moe":
        return {
            **base,
            **Gqa().config(),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return kimi.config(kimi.KINDS[family], base)


def _draft_config(
    target: Target, boundaries: Sequence[int], ids: Sequence[int], convention: str | None, mla: bool
) -> dict[str, Any]:
    kind: dict[str, Any] = {
        **Gqa(heads=2, kv_heads=2).config(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": 128,
        "mlp_bias": False,
    }
    if mla:
        kind = {**kimi.deepseek(), "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if ids:
        eagle["eagle_aux_hidden_state_layer_ids"] = list(ids)
    if convention is not None:
        eagle["eagle_aux_hidden_state_layer_convention"] = convention
    return {
        **_COMMON,
        **kind,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "num_aux_hidden_states": len(boundaries),
        "eagle_config": eagle,
    }


def _save(directory: Path, config: dict[str, Any], weights: Weights) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(dict(weights), str(directory / "model.safetensors"), metadata={"format": "pt"})
