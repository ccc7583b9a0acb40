"""Run by an SGLang environment's Python: every order of five steps, each in a process of its own, on one activation route.

usage: python orders_driver.py ROUTE [without-hooks]      prints one JSON object: order -> what was found

The parent imports what is heavy and knows nothing of us (torch, the inner model), then forks once for each order, so that 120
processes of a real release take seconds. The `.pth` has armed its finder in the parent; each child lets it go off where its
order says that SGLang is met for the first time.
"""

import importlib.machinery
import itertools
import json
import os
import sys

from sglang_eagle3_plugin import _bootstrap

ROUTE = sys.argv[1]
WITHOUT_HOOKS = sys.argv[2:] == ["without-hooks"]
STEPS = ("activate", "import", "again", "revert", "other")
WRAPPER = "sglang.srt.models.kimi_k25"
HOOKS = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head", "get_embed", "set_embed")

_bootstrap._WaitForSGLang.waiting = False  # hold the `.pth` back in the parent


def activate() -> None:
    if ROUTE == "pth":
        _bootstrap._WaitForSGLang.waiting = True
        _bootstrap._WaitForSGLang.find_spec("sglang")
    else:
        from sglang.srt import plugins

        plugins._plugins_loaded = False  # a second call is a second scheduler start in one process
        plugins.load_plugins()


class ForkThatLacksTheHooks:
    """The wrapper as a fork from before the hooks has it: they are taken off before anybody sees the class."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != WRAPPER or not WITHOUT_HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for hook in HOOKS:
                if hook in vars(module.KimiK25ForConditionalGeneration):
                    delattr(module.KimiK25ForConditionalGeneration, hook)

        spec.loader.exec_module = exec_module
        return spec


def step_import() -> None:
    import sglang.srt.models.kimi_k25  # noqa: F401


def revert() -> None:
    from sglang_eagle3_plugin import activation
    from sglang_eagle3_plugin.patches import REGISTRY

    activation.revert(REGISTRY[0])


def other() -> None:
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as Wrapper

    before = getattr(Wrapper, "get_embed_and_head", None)
    Wrapper.get_embed_and_head = lambda self: ("other's", before(self) if before else None)


RUN = {"activate": activate, "import": step_import, "again": activate, "revert": revert, "other": other}


class Inner:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        return "setter"

    def get_embed_and_head(self):
        return "inner's"


def found() -> dict:
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as Wrapper

    from sglang_eagle3_plugin.activation import outcomes
    from sglang_eagle3_plugin.patching import is_ours

    wrapper = object.__new__(Wrapper)
    wrapper.__dict__["language_model"] = Inner()  # the methods are the release's or ours; only the inner model stands in
    has = hasattr(Wrapper, "set_eagle3_layers_to_capture")
    return {
        "setter": wrapper.set_eagle3_layers_to_capture([1]) if has else "absent",
        "embed": wrapper.get_embed_and_head() if hasattr(Wrapper, "get_embed_and_head") else "absent",
        "state": next((o.state.value for o in outcomes() if o.patch.id == "delegation-kimi-k25"), "pending"),
        "ours": sorted(name for name, value in vars(Wrapper).items() if is_ours(value)),
    }


def in_a_process_of_its_own(order: tuple) -> dict:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for step in order:
                RUN[step]()
            answer = found()
        except BaseException as error:
            answer = {"error": repr(error)}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return answer


if __name__ == "__main__":
    step_import()  # with all that it imports, so that a child has only the wrapper itself to import
    del sys.modules[WRAPPER]
    sys.meta_path.insert(0, ForkThatLacksTheHooks)
    answers = {"-".join(order): in_a_process_of_its_own(order) for order in itertools.permutations(STEPS)}
    print("\n" + json.dumps(answers))
