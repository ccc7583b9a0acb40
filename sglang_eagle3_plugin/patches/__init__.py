"""The patches, one module an idea. `REGISTRY` is what activation hooks, status lists, and the docs are generated from."""

from __future__ import annotations

from sglang_eagle3_plugin.patches import boundary_wiring, delegation, dump_requests, forward_tap, startup_check
from sglang_eagle3_plugin.patching import Patch

REGISTRY: tuple[Patch, ...] = (
    *delegation.PATCHES,
    *startup_check.PATCHES,
    *boundary_wiring.PATCHES,
    *forward_tap.PATCHES,
    *dump_requests.PATCHES,
)
