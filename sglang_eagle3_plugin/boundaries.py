"""The one idea: capture boundaries. Pure; no torch, no SGLang.

Boundary k of a target with L decoder layers is the residual stream entering decoder layer k: 0 is the embedding output, L the
output of the last layer before the final norm. SGLang's ``layers_to_capture``, vLLM's ids and the index into a Hugging Face
``hidden_states`` tuple are boundaries. SpecForge, ModelOpt, TorchSpec and AngelSlim write ids of layers whose *output* is wanted:
boundary = id + 1. A draft config carries ids; which of the two it means is its *convention*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Convention(str, Enum):
    """What a layer id in a draft config names."""

    OUTPUT = "output"
    """The layer whose output is wanted: boundary = id + 1. SpecForge, ModelOpt, TorchSpec, AngelSlim."""
    BOUNDARY = "boundary"
    """The boundary itself. vLLM, speculators, Hugging Face ``hidden_states``."""

    def to_boundaries(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Read ids as boundaries."""
        shift = 1 if self is Convention.OUTPUT else 0
        return tuple(i + shift for i in ids)

    def to_ids(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Write boundaries as ids; the inverse of :meth:`to_boundaries`."""
        shift = 1 if self is Convention.OUTPUT else 0
        return tuple(b - shift for b in boundaries)


class BoundaryError(ValueError):
    """A list of boundaries that no target of this depth can deliver; the message says which and why."""


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """The boundaries of a draft that names no ids: 2, L // 2, L - 3 (SGLang's setters called without ids, EAGLE-3's own code)."""
    return (2, num_layers // 2, num_layers - 3)


def check(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the boundaries as a tuple if a target of ``num_layers`` layers can deliver them, in ascending order.

    Raises:
        BoundaryError: one is outside 0..num_layers, one stands twice, or they do not ascend. SGLang captures in layer order
            whatever the order of the ids, so a list in another order would feed the draft's ``fc`` permuted slots.
    """
    outside = [b for b in boundaries if not 0 <= b <= num_layers]
    if outside:
        raise BoundaryError(f"boundary {_join(outside)} is outside 0..{num_layers} (the target has {num_layers} layers)")
    if len(set(boundaries)) != len(boundaries):
        raise BoundaryError(f"a boundary stands twice in {_join(boundaries)}")
    if list(boundaries) != sorted(boundaries):
        raise BoundaryError(f"boundaries {_join(boundaries)} do not ascend, and SGLang captures in layer order")
    return tuple(boundaries)


def is_possible(boundaries: Sequence[int], num_layers: int) -> bool:
    """Whether :func:`check` accepts them."""
    try:
        check(boundaries, num_layers)
    except BoundaryError:
        return False
    return True


@dataclass(frozen=True)
class Decision:
    """Which boundaries a draft was trained on, and how that was decided.

    Attributes:
        boundaries: the wanted boundaries, ascending; ``()`` when the draft takes no auxiliary states; ``None`` when undecidable.
        convention: how its ids are read, ``"default"`` when it names none, ``"explicit"`` when the user gave boundaries,
            ``"recorded"`` when they are those of the dump it was trained on, ``"none"`` when it takes no auxiliary states,
            ``"ambiguous"`` when undecidable.
        decided_by: ``user``, ``draft config``, ``provenance``, ``format``, ``range``, ``pattern``, ``default`` or ``undecidable``.
        evidence: one sentence for the log line and for reports.
        readings: for an undecidable draft both readings, convention value -> boundaries; else empty.
    """

    boundaries: tuple[int, ...] | None
    convention: str
    decided_by: str
    evidence: str
    readings: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def from_outside(self) -> bool:
        """Whether the user, or a record of the training, decided, and not the draft's config or its ids."""
        return self.decided_by in ("user", "provenance")


def decide(
    ids: Sequence[int] | None,
    num_layers: int,
    *,
    user_boundaries: Sequence[int] | None = None,
    user_convention: Convention | None = None,
    config_convention: Convention | None = None,
    recorded: tuple[Sequence[int], str] | None = None,
    provenance: tuple[Convention, str] | None = None,
    format_convention: tuple[Convention, str] | None = None,
    uses_aux_hidden_states: bool = True,
) -> Decision:
    """Decide the wanted boundaries; the first of these that speaks wins, and the result says which.

    1. the user: ``user_boundaries`` (``EAGLE3_CAPTURE_BOUNDARIES``), then ``user_convention`` (``EAGLE3_LAYER_CONVENTION``);
    2. the draft config: no auxiliary states (``use_aux_hidden_state: false``), our field ``config_convention``;
    3. ``recorded``, the boundaries in a dump manifest of ours beside the draft, then ``provenance``, a known published draft; each
       with its evidence. A draft that lists no ids and has no manifest means the default boundaries;
    4. ``format_convention``: a file format that fixes the convention (speculators);
    5. range: only one of the two readings exists in a target of this depth;
    6. pattern: a first id of 1 is how SpecForge's, ModelOpt's and AngelSlim's templates write boundary 2 (SGLang PR #25454 decides
       by the same sign);
    7. undecidable.

    Args:
        ids: layer ids as the draft config lists them, or None when it lists none.
        num_layers: L, decoder layers of the target.

    Raises:
        BoundaryError: what was decided cannot be captured in a target of this depth, or no reading can.
    """
    if user_boundaries is not None:
        return Decision(check(user_boundaries, num_layers), "explicit", "user", "EAGLE3_CAPTURE_BOUNDARIES is set")
    if not uses_aux_hidden_states:
        return Decision((), "none", "draft config", "the draft config says use_aux_hidden_state: false")
    if recorded is not None and not (ids and (user_convention or config_convention)):
        return Decision(check(recorded[0], num_layers), "recorded", "provenance", recorded[1])
    if not ids:
        wanted = check(default_boundaries(num_layers), num_layers)
        return Decision(wanted, "default", "default", "the draft config lists no layer ids: 2, L//2, L-3 is meant")

    for source, said in (
        ("user", (user_convention, "EAGLE3_LAYER_CONVENTION is set") if user_convention else None),
        (
            "draft config",
            (config_convention, "the draft config states its layer id convention") if config_convention else None,
        ),
        ("provenance", provenance),
        ("format", format_convention),
    ):
        if said is not None:
            convention, evidence = said
            return Decision(check(convention.to_boundaries(ids), num_layers), convention.value, source, evidence)

    readings = {c: c.to_boundaries(ids) for c in Convention}
    possible = [c for c in Convention if is_possible(readings[c], num_layers)]
    if not possible:
        check(readings[Convention.OUTPUT if min(ids) < 0 else Convention.BOUNDARY], num_layers)
    if len(possible) == 1:
        other = next(c for c in Convention if c not in possible)
        evidence = f"read as {other.value} ids they would be boundaries {_join(readings[other])} of 0..{num_layers}"
        return Decision(readings[possible[0]], possible[0].value, "range", evidence)
    if ids[0] == 1:
        evidence = "the first id is 1, which trainers that count layer outputs write for boundary 2"
        return Decision(readings[Convention.OUTPUT], Convention.OUTPUT.value, "pattern", evidence)
    return Decision(
        None,
        "ambiguous",
        "undecidable",
        f"ids {_join(ids)} are boundaries {_join(readings[Convention.OUTPUT])} if they name layer outputs, "
        f"{_join(readings[Convention.BOUNDARY])} if they name boundaries, and nothing in the draft says which",
        tuple((c.value, readings[c]) for c in Convention),
    )


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(str(n) for n in numbers)
