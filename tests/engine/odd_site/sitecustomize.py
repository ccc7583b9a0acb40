"""Before the rig's own, in every process of an engine under test: KimiK25ForConditionalGeneration has a shape that nobody has seen.

As in a fork: the hooks are gone, and ``forward`` does not say where the inner model is kept.
"""

import importlib.machinery
import os
import runpy
import sys
from pathlib import Path

WRAPPER = "sglang.srt.models.kimi_k25"


class OddFork:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != WRAPPER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            wrapper = module.KimiK25ForConditionalGeneration
            wrapper.forward = lambda self, *args, **kwargs: None
            for hook in ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"):
                if hook in vars(wrapper):
                    delattr(wrapper, hook)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, OddFork)
runpy.run_path(str(Path(os.environ["EAGLE3_TEST_RIG_SITE"], "sitecustomize.py")))
