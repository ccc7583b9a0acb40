"""What the wheel's `.pth` runs at the start of every interpreter: wait, at next to no cost, until SGLang is imported.

Schedulers are spawned processes, and releases before 0.5.11 have no plugin entry point; `site` is what runs in each of them. So
this module must stay tiny: it imports `sys` alone, reads no environment, and does its work only when somebody imports `sglang`.
"""

import sys


class _WaitForSGLang:
    """A meta path finder that finds nothing; the first `import sglang` activates the plugin."""

    waiting = True

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        # It stays on sys.meta_path when done: the import system is iterating over that list right now.
        if name == "sglang" and cls.waiting:
            cls.waiting = False
            try:
                from sglang_eagle3_plugin.activation import activate

                activate("pth")
            except Exception as error:
                sys.stderr.write(f"sglang-eagle3-plugin: not active in this process ({error!r})\n")


sys.meta_path.insert(0, _WaitForSGLang)
