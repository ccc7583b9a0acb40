"""EAGLE3_DEBUG: what the draft is fed, in the server that runs, with its CUDA graphs on; switched without a restart.

`sampling` looks at passes on the thread that runs them and enqueues `step`'s measures; `thread` obeys `control`, and hands what has
arrived to a `child`. That runs `writer`, in a process of its own, and makes lines: `read`, `report`, `output`, and `ranks` for what
only several processes can tell. `wire` is between the two. See docs/debug.md.
"""

from __future__ import annotations

from typing import Any

from sglang_eagle3_plugin.settings import Settings


def start(runner: Any, settings: Settings) -> None:
    """Make debug switchable in this process, and turn it on where EAGLE3_DEBUG says so; see :func:`tap.runner_ready`."""
    from sglang_eagle3_plugin.runtime.debug.thread import begin

    begin(runner, settings)
