"""Inside an engine process: stand-ins for the kernels that a machine without a GPU lacks, and the observer.

Runs in the environment of an SGLang release, so it imports only the standard library (and torch once SGLang has). Nothing here
touches what the plugin patches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from . import hooks, labelling, observer, replacements


def install() -> None:
    """Register the stand-ins of this SGLang release and the observer. Imports nothing of SGLang or torch itself."""
    _die_with_launcher()
    after = {replacement.module: replacement.install for replacement in replacements.REPLACEMENTS}
    if os.environ.get("EAGLE3_RIG_OBSERVE"):
        after[observer.MODULE] = observer.install
    if os.environ.get("EAGLE3_RIG_LABEL"):
        after[labelling.MODULE] = hooks.both(after.get(labelling.MODULE), labelling.install)
        after[labelling.PROCESSOR_MODULE] = labelling.prepare_images_here
    release = replacements.sglang_release()
    needed = [stub for stub in replacements.STUBS if stub.needed(release)]
    lenders = {name: lender for stub in needed for name, lender in stub.lends.items()}
    sys.meta_path.insert(0, hooks.Finder(after, [name for stub in needed for name in stub.modules], lenders))


def _die_with_launcher() -> None:
    # A launcher that is killed cannot end its engine; Linux can (PR_SET_PDEATHSIG is 1). SGLang's own children follow their parent.
    if os.environ.get("EAGLE3_RIG_LAUNCHER") == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
