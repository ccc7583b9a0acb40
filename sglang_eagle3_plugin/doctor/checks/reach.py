"""Whether the plugin reaches every process of the server that needs it."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding
from sglang_eagle3_plugin.settings import ENTRY_POINT_NAME, Settings

_VARIABLE = "SGLANG_PLUGINS"


def check(d: Deployment) -> Iterator[Finding]:
    """Find an environment that keeps the plugin out, and note by which route it comes in."""
    settings = Settings.from_environment(d.environ)
    if not settings.allowed_by_sglang:
        yield Finding(
            "WARN_PLUGIN_ALLOWLIST",
            f"{_VARIABLE} is a list of the plugins that SGLang may load, and {ENTRY_POINT_NAME} is not in it: ours is skipped.",
            (Evidence("environment", _VARIABLE, d.environ.get(_VARIABLE, "")[:120]),),
            f"Add {ENTRY_POINT_NAME} to {_VARIABLE}, or unset it.",
        )
    elif not settings.enabled:
        yield Finding(
            "WARN_PLUGIN_OFF",
            "EAGLE3_PLUGIN=0 turns the plugin off in this environment.",
            (Evidence("environment", "EAGLE3_PLUGIN", d.environ.get("EAGLE3_PLUGIN", "")[:40]),),
            "Unset EAGLE3_PLUGIN.",
        )
    if not facts.known(d.release):
        return
    if facts.before(d.release, facts.ENTRY_POINTS_FROM):
        how = (
            f"SGLang {d.release} has no plugin entry points (they come with {facts.ENTRY_POINTS_FROM}); what the parent process "
            f"changes is "
            "lost in the spawned scheduler. The plugin's .pth file is read by every Python process of its environment."
        )
    elif facts.before(d.release, facts.ENTRY_POINTS_EVERYWHERE_FROM):
        how = (
            f"SGLang {d.release} loads plugins in the launcher, the engine and the scheduler, not in the detokenizer or the DP "
            f"controller; "
            "all of our work is in the scheduler."
        )
    else:
        how = f"SGLang {d.release} loads plugins in all its processes."
    yield Finding(
        "PLUGIN_ALL_PROCESSES",
        how,
        (d.of_release(),),
        "sglang-eagle3 status --url URL lists the patched classes of each process, and fails when the scheduler is not among them.",
    )
    if facts.since(d.release, facts.ENTRY_POINTS_FROM):
        yield Finding(
            "PLUGIN_FAIL_LOUD",
            "SGLang only logs what a plugin raises and serves on with stock behaviour.",
            (d.of_release(),),
            "Set EAGLE3_STRICT=1 to make a patch that fails stop the server; sglang-eagle3 status reads back what was applied.",
        )
