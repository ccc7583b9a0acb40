"""How well a class is served in a release: unmodified, with this plugin, or not at all. Stdlib only.

What the plugin can do is said here once, for the matrix, ``wiring`` and the doctor. It is a prediction from a release's files: in a
server the patches decide by the structure of the loaded model.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_eagle3_plugin import releases, structure
from sglang_eagle3_plugin.releases import ClassFacts, ReleaseFacts

NATIVE = "native"
PLUGIN = "plugin"
REWIRED = "plugin:rewired"
BROKEN = "broken"
ABSENT = "absent"
LEVELS = (NATIVE, REWIRED, PLUGIN, BROKEN, ABSENT)

OLDEST = "0.5.4.post2"
"""The oldest release that the plugin is made for (the extra ``sglang`` in pyproject.toml)."""

_STREAMS = frozenset(stream.value for stream in structure.Stream)


@dataclass(frozen=True)
class Support:
    """How a class is served in a release.

    Attributes:
        level: one of ``LEVELS``.
        why: one clause: what stock SGLang lacks, what the plugin does about it, or why it can't.
        evidence: ``executed`` where the release's own setter was run, ``read`` where its files were read.
    """

    level: str
    why: str
    evidence: str


def plugin_can(facts: ClassFacts) -> tuple[bool, str]:
    """Whether the plugin serves a class that stock SGLang doesn't, and how; or why not."""
    lacks = facts.setter is None or facts.rule in (releases.DEAD, releases.UNKNOWN)
    setter = "a set_eagle3_layers_to_capture that captures" if facts.rule == releases.DEAD else "set_eagle3_layers_to_capture"
    missing = " and ".join(name for name, gone in ((setter, lacks), ("get_embed_and_head", facts.accessor is None)) if gone)
    if facts.never:
        return False, facts.never
    if not missing:
        return True, "the plugin sets the boundaries that the draft was trained on"
    if facts.chosen == "model":
        return False, "its layers are another library's, chosen when it is loaded, and take no forward_batch: none can be tapped"
    if facts.rule == releases.UNKNOWN:
        return False, f"its setter could not be followed ({facts.why or 'it fits no known rule'})"
    if facts.inner and lacks:
        return True, f"the plugin hands {missing} on to the inner model ({facts.inner})"
    if facts.chosen:
        return True, f"the plugin hands {missing} on to the inner model ({facts.chosen}) that its config names, where that can"
    if facts.capture is not None:
        return True, f"the plugin supplies {missing}; the layer stack ({facts.stack}) can capture"
    if facts.stream in _STREAMS:
        return True, f"the plugin supplies {missing} and captures at the layers' inputs"
    if facts.stream.startswith("refused: "):
        return False, f"its layers can't be tapped: {facts.stream.removeprefix('refused: ')}"
    return False, f"it has no {missing}; its decoder layers were not found in its files, so only a start will show whether we can"


def support(release: str, class_name: str) -> Support:
    """How a class is served in a release, whichever the draft; a pair of draft and target is judged by ``pairs``."""
    facts = releases.class_facts(release, class_name)
    known, _ = releases.nearest(release)
    if facts is None or known is None:
        return Support(ABSENT, "the release has no such class", "read")
    return judge(facts, releases.release_facts(known), made_for(release))


def made_for(release: str) -> bool:
    """Whether the plugin is made for a release; a name that is none of SGLang's is a fork, taken for new."""
    place, oldest = releases.order(release), releases.order(OLDEST)
    return place is None or oldest is None or place >= oldest


def judge(facts: ClassFacts, whole: ReleaseFacts, supported: bool = True) -> Support:
    """As :func:`support`, from facts at hand: those of a source tree, say. ``supported``: the plugin is made for the release."""
    can, how = plugin_can(facts) if supported else (False, f"the plugin is made for {OLDEST} and later")
    if facts.never or facts.setter is None or facts.accessor is None or facts.rule in (releases.DEAD, releases.UNKNOWN):
        # How the plugin would serve it is read off the files, whatever was executed.
        return Support(PLUGIN if can else BROKEN, how, "read")
    if whole.graph_ids != "configured" and not supported:
        return Support(
            NATIVE, "for drafts without layer ids: CUDA graphs capture the default boundaries, whatever the ids", "executed"
        )
    if whole.graph_ids != "configured":
        return Support(REWIRED, "CUDA graphs capture the default boundaries, whatever the draft's ids", "executed")
    return Support(NATIVE, releases.RULES[facts.rule or "fixed"].text, "executed")
