"""The one place where the doctor asks what an SGLang release does: of `releases`, and of what is written down here.

Here stands what was read in the released wheels and is no part of the survey, with where it was read. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_eagle3_plugin import releases
from sglang_eagle3_plugin.releases import Captured

SEVERAL_AUX_FROM = "0.5.12"
"""llama_eagle3 counts its auxiliary states from here on; 3 hard-coded before (PR 24663)."""
SEVERAL_LAYERS_FROM = "0.5.12"
"""llama_eagle3 builds num_hidden_layers layers and knows them as layers.N; before: one, called midlayer."""
DRAFT_QUANTISATION_FROM = "0.5.7"
"""--speculative-draft-model-quantization exists from here on (server_args.py)."""
FORCED_OFF_FROM = "0.5.10"
"""--enforce-disable-flashinfer-allreduce-fusion exists from here on (server_args.py)."""
ENTRY_POINTS_FROM = "0.5.11"
ENTRY_POINTS_EVERYWHERE_FROM = "0.5.23"
"""The detokenizer and the DP controller load plugins too (srt/plugins)."""
RETURN_AUX_FROM = "0.5.23"
"""--enable-return-aux-hidden-states exists from here on (server_args.py)."""


@dataclass(frozen=True)
class Report:
    """Target classes that were measured bad from ``first`` until ``fixed``."""

    classes: frozenset[str]
    first: str
    fixed: str
    good: str
    what: str
    source: str


KNOWN_BAD = (
    Report(
        frozenset({"Qwen2_5_VLForConditionalGeneration"}),
        "0.5.5",
        "0.5.10",
        "0.5.4",
        "acceptance length 1.04 where 0.5.4 gave 2.20; the draft is not handed the image embeddings until 0.5.10",
        "sglang issue 14060, PR 19730",
    ),
)

_PARTIAL_SUMS: dict[str, tuple[str, str]] = {
    "DeepseekV2Model": ("0.5.4.post2", "0.5.14"),
    "GptOssModel": ("0.5.0rc1", "0.5.21"),
    "Glm4MoeModel": ("0.5.5", "0.5.21"),
    "Glm4MoeLiteModel": ("0.5.13", "0.5.21"),
    "LagunaModel": ("0.5.15", "0.5.21"),
}
"""Layer stacks that fuse the MLP's all-reduce into the next norm and append ``hidden_states + residual`` before it, from the first
release to the one that mends it (read in srt/models of every wheel; PR 28343)."""

_FUSES_BY_ITSELF: dict[str, str] = {
    "DeepseekV3ForCausalLM": "0.5.3.post2",
    "DeepseekV32ForCausalLM": "0.5.11",
    "GptOssForCausalLM": "0.5.0rc2",
    "Glm4MoeForCausalLM": "0.5.7",
    "Glm4MoeLiteForCausalLM": "0.5.8",
    "GlmMoeDsaForCausalLM": "0.5.11",
    "KimiK25ForConditionalGeneration": "0.5.9",
    "MistralLarge3ForCausalLM": "0.5.13",
}
"""Targets for which SGLang turns the fused all-reduce on by itself on SM90 and SM100, from which release on (server_args.py)."""


def known(release: str | None) -> bool:
    """Whether a release is named as SGLang names its releases; a fork is not."""
    return release is not None and releases.order(release) is not None


def surveyed(release: str | None) -> bool:
    """Whether a release is one of those whose facts were read."""
    return release is not None and releases.nearest(release)[1]


def before(release: str | None, other: str) -> bool:
    """Whether a release is known and older than another."""
    mine, theirs = releases.order(release or ""), releases.order(other)
    return mine is not None and theirs is not None and mine < theirs


def since(release: str | None, other: str) -> bool:
    """Whether a release is known and as new as another."""
    mine, theirs = releases.order(release or ""), releases.order(other)
    return mine is not None and theirs is not None and mine >= theirs


def newest() -> str:
    """The newest release that was surveyed."""
    return releases.known_releases()[-1]


def captures(release: str | None, architecture: str | None, ids: Sequence[int] | None, depth: int) -> Captured | None:
    """What a stock release captures in a target; None where the release, its class or its rule is unknown."""
    if release is None or architecture is None or not known(release):
        return None
    return releases.captured(release, architecture, ids, depth)


def ids_for(release: str | None, architecture: str | None, boundaries: Sequence[int], depth: int) -> tuple[int, ...] | None:
    """Return ids that a release reads as these boundaries and captures; None where there are none, or it cannot be said."""
    for shift in (1, 0):
        ids = tuple(b - shift for b in boundaries)
        got = captures(release or newest(), architecture, ids, depth)
        if got is not None and got.eager == got.will_emit == tuple(boundaries):
            return ids
    return None


def captured_from(
    release: str | None, architecture: str | None, ids: Sequence[int] | None, depth: int, wanted: Sequence[int] | None
) -> str | None:
    """Return the first later release that captures the wanted boundaries by itself, in graphs and out; None where there is none."""
    for later in _later(release):
        got = captures(later, architecture, ids, depth)
        if wanted is not None and got is not None and got.eager == got.graph == got.will_emit == tuple(wanted):
            return later
    return None


@dataclass(frozen=True)
class Hooks:
    """What a target class has of the EAGLE-3 hooks.

    Attributes:
        setter: it has ``set_eagle3_layers_to_capture``, own or inherited.
        accessor: it has ``get_embed_and_head``.
        dead: the setter captures nothing.
        mendable: nothing in its structure is known to keep the plugin from supplying what it lacks.
    """

    setter: bool
    accessor: bool
    dead: bool = False
    mendable: bool = True

    def describe(self) -> str:
        """Say it in a few words, per method."""
        setter = "captures nothing" if self.dead else "yes" if self.setter else "no"
        return f"set_eagle3_layers_to_capture: {setter}; get_embed_and_head: {'yes' if self.accessor else 'no'}"


def hooks(release: str | None, architecture: str, source: Path | None) -> Hooks | None:
    """What a class has in a release, or in a source tree where one is given; None where neither knows the class."""
    if source is not None:
        from sglang_eagle3_plugin.doctor import source as tree

        found = tree.hooks(source, architecture)
        if found is not None and surveyed(release) and release is not None:
            facts = releases.class_facts(release, architecture)
            # That a setter marks nothing cannot be seen in the class's own methods; the survey ran it.
            return replace(found, dead=facts is not None and facts.rule == releases.DEAD)
        if found is not None or release is None:
            return found
    if release is None or not known(release):
        return None
    facts = releases.class_facts(release, architecture)
    if facts is None:
        return None
    return Hooks(
        facts.setter is not None, facts.accessor is not None, facts.rule == releases.DEAD, not facts.stream.startswith("refused")
    )


def native_from(release: str | None, architecture: str) -> str | None:
    """Return the first release, later than a given one, in which a class has both hooks and captures."""
    for later in _later(release):
        found = hooks(later, architecture, None)
        if found is not None and found.setter and found.accessor and not found.dead:
            return later
    return None


def missing_setter(release: str | None) -> str:
    """The exception in which a class without setter ends."""
    return releases.release_facts(releases.nearest(release or newest())[0] or newest()).missing_setter


def draft_class_from(name: str) -> str | None:
    """Return the first release with a draft class of this name; None where none has one."""
    return next((r for r in releases.known_releases() if name in releases.release_facts(r).drafts), None)


def norm_from(name: str, draft_class: str) -> str | None:
    """Return the first release whose draft class reads a norm flag; None where none does."""
    return next((r for r in releases.known_releases() if name in releases.release_facts(r).drafts.get(draft_class, ())), None)


def marks(release: str | None, architecture: str | None) -> bool:
    """Whether a class captures by marks on its layers, which its setter never clears."""
    if release is None or architecture is None or not known(release):
        return False
    facts = releases.class_facts(release, architecture)
    return facts is not None and facts.capture == "mark"


def partial_sums(release: str | None, architecture: str | None) -> tuple[str, str] | None:
    """Return the layer stack of a target that captures before a fused all-reduce, and the release that mends it."""
    if release is None or architecture is None or not known(release):
        return None
    facts = releases.class_facts(release, architecture)
    span = _PARTIAL_SUMS.get(facts.stack) if facts else None
    if facts is None or span is None or not (since(release, span[0]) and before(release, span[1])):
        return None
    return facts.stack, span[1]


def fuses_by_itself(release: str | None, architecture: str | None) -> bool:
    """Whether SGLang turns the fused all-reduce on without being asked, on Hopper and Blackwell at tensor parallelism above 1."""
    first = _FUSES_BY_ITSELF.get(architecture or "")
    return first is not None and since(release, first)


def _later(release: str | None) -> Iterator[str]:
    return (r for r in releases.known_releases() if before(release, r))
