"""The demonstration: one tiny Kimi-K2.5 with an EAGLE-3 draft on a real SGLang release, without the plugin and with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_eagle3_plugin.rig import engine, environments, installing, models

DEFAULT_RELEASE = "0.5.9"
"""The last release whose KimiK25ForConditionalGeneration lacks the EAGLE-3 hooks."""
PATCH = "delegation-kimi-k25"
BOUNDARIES = (3, 5, 6)
"""What the draft was made for, of 8. Its config lists 2, 4, 5 and says that these name layer outputs."""
NUM_STEPS = 3


@dataclass(frozen=True)
class Demonstration:
    """What was seen.

    Attributes:
        release: of SGLang.
        stock: the run with ``EAGLE3_PLUGIN=0``.
        plugin: the same run with the plugin.
        state: of the patch for KimiK25ForConditionalGeneration in the second run, ``unknown`` if it left no record.
    """

    release: str
    stock: engine.EngineResult
    plugin: engine.EngineResult
    state: str

    @property
    def works(self) -> bool:
        """Whether, with the plugin, every draft token was accepted and the draft was fed its own boundaries."""
        return self.plugin.spec_accept_length == NUM_STEPS + 1 and self.plugin.boundaries == BOUNDARIES


def demonstrate(release: str, say: Callable[[str], None]) -> Demonstration:
    """Run the demonstration on one release.

    Args:
        release: built into the cache on first use.
        say: is called with a line about each step.

    Raises:
        UserError: the environment cannot be had.
    """
    environment = environments.ensure(release, say)
    say(f"installing the plugin beside sglang {environment.release}")
    installing.install_plugin(environment)
    with tempfile.TemporaryDirectory(prefix="eagle3-demo-") as scratch:
        say("making a tiny Kimi-K2.5 (8 layers) and an EAGLE-3 draft for it")
        target = models.target(Path(scratch, "target"), "kimi-k25")
        draft = models.draft(Path(scratch, "draft"), target, BOUNDARIES, convention="output")
        spec = engine.EngineSpec(target.path, draft, num_steps=NUM_STEPS)
        say("running it with the plugin off (up to a minute)")
        stock = engine.run(environment, spec.stock())
        say(f"that took {stock.seconds:.0f} s; running it with the plugin (about a minute)")
        plugin = engine.run(environment, spec)
        say(f"that took {plugin.seconds:.0f} s")
    return Demonstration(environment.release, stock, plugin, plugin.patch_states.get(PATCH, "unknown"))
