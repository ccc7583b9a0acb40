"""Python runs this at the start of every process that has this directory on its path: the engine's own and all that it spawns.

Two keys turn the rig on, the path and ``EAGLE3_RIG=1``, so that neither an inherited path nor a stray variable can put stand-ins
into a serving process.
"""

import os

if os.environ.get("EAGLE3_RIG") == "1":
    import eagle3_rig  # type: ignore[import-not-found]  # on the path that this file is on

    eagle3_rig.install()
