"""Activation: once a process, by either route, without touching what it should not."""

from __future__ import annotations

import itertools
import json
import textwrap

import pytest
from checkpoint_making import good_pair

CALL = """
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as K
k = K()
print(k.set_eagle3_layers_to_capture([2, 30, 58]), k.get_embed_and_head(), k.set_embed_and_head(1, 2))
"""
DELEGATED = "('setter', [2, 30, 58]) ('embed', 'head') ('set', 1, 2)\n"
UNTOUCHED = """
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as K
print(sorted(n for n in vars(K) if "embed" in n or "eagle3" in n))
"""


def test_pth_alone_delegates(stand_in):
    assert stand_in(CALL).stdout == DELEGATED


@pytest.mark.parametrize("env", [{"EAGLE3_PLUGIN": "0"}, {"SGLANG_PLUGINS": "other"}, {"SGLANG_PLUGINS": "other, another"}])
@pytest.mark.parametrize("route", ["", "from sglang_eagle3_plugin.plugin import activate; activate()\n"])
def test_turned_off_leaves_the_class_untouched(stand_in, env, route):
    assert stand_in(route + UNTOUCHED, **env).stdout == "[]\n"


@pytest.mark.parametrize("names", ["eagle3", "other, eagle3 ", ""])
def test_sglang_plugins_that_lists_us_lets_us_in(stand_in, names):
    assert stand_in(CALL, SGLANG_PLUGINS=names).stdout == DELEGATED


def test_native_methods_stay_the_releases_own_objects(stand_in):
    native = """
    class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
        pass
    """
    out = stand_in(
        UNTOUCHED + "from sglang_eagle3_plugin.activation import outcomes\nprint(outcomes()[0].state.value)", wrapper=native
    )
    assert out.stdout == "[]\nnative\n"


def test_half_hooked_wrapper_gets_the_missing_half(stand_in):
    half = """
    class KimiK25ForConditionalGeneration:
        def __init__(self): self.language_model = DeepseekV3ForCausalLM()
        def forward(self): return self.language_model
        def get_embed_and_head(self): return "its own"
    """
    snippet = CALL + "print(sorted(n for n in vars(K) if hasattr(vars(K)[n], '__eagle3_patch__')))"
    out = stand_in(snippet, wrapper=half).stdout
    assert "its own" in out
    assert "['set_eagle3_layers_to_capture', 'set_embed_and_head']" in out


UNKNOWN = """
class KimiK25ForConditionalGeneration:
    def __init__(self): self.tower = make_something()
    def forward(self): return self.tower
"""


def test_unknown_shape_is_one_warning_that_names_class_release_reason_and_remedy(stand_in):
    done = stand_in(UNTOUCHED, wrapper=UNKNOWN)
    assert done.stdout == "[]\n"
    assert done.stderr.count("sglang-eagle3-plugin:") == 1
    for part in ("KimiK25ForConditionalGeneration", "0.5.9+stand-in", "one inner model", "sglang-eagle3 compat"):
        assert part in done.stderr


def test_strict_stops_the_process_with_the_message(stand_in):
    done = stand_in(UNTOUCHED, wrapper=UNKNOWN, check=False, EAGLE3_STRICT="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "KimiK25ForConditionalGeneration" in done.stderr
    assert "EAGLE3_STRICT=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_child_does_not_repeat_its_parents_warning(stand_in):
    snippet = """
    import subprocess, sys
    import sglang.srt.models.kimi_k25
    subprocess.run([sys.executable, "-c", "import sglang.srt.models.kimi_k25"])
    """
    assert stand_in(snippet, wrapper=UNKNOWN).stderr.count("sglang-eagle3-plugin:") == 1


def test_a_setting_that_does_not_parse_is_named_and_serving_goes_on(stand_in):
    done = stand_in(CALL, EAGLE3_STRICT="maybe")
    assert done.stdout == DELEGATED
    assert "EAGLE3_STRICT='maybe' is neither 1 nor 0" in done.stderr


STEPS = {
    "activate": "from sglang_eagle3_plugin.plugin import activate; activate()",
    "import": "import sglang.srt.models.kimi_k25",
    "again": "import sglang_eagle3_plugin.activation as a; a.activate('entry-point'); a.activate('pth')",
    "revert": """
from sglang_eagle3_plugin import activation
from sglang_eagle3_plugin.patches import REGISTRY
activation.revert(REGISTRY[0])
""",
    "other": """
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as K
before = getattr(K, "get_embed_and_head", None)
def get_embed_and_head(self): return ("other's", before(self) if before else None)
K.get_embed_and_head = get_embed_and_head
""",
}
CHECK = """
import json
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as K
from sglang_eagle3_plugin.activation import outcomes
k = K()
mark = "__eagle3_patch__"
print(json.dumps({
    "setter": k.set_eagle3_layers_to_capture([1])[0] if hasattr(K, "set_eagle3_layers_to_capture") else None,
    "embed": k.get_embed_and_head() if hasattr(K, "get_embed_and_head") else None,
    "state": outcomes()[0].state.value,
    "ours": sorted(n for n in vars(K) if hasattr(vars(K)[n], mark)),
}))
"""


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids="-".join)
def test_every_order_of_activation_import_revert_and_a_second_plugin(stand_in, order):
    found = json.loads(stand_in("\n".join(STEPS[step] for step in order) + CHECK).stdout)
    # The `.pth` activates at the first import of sglang, so what is imported is patched, whoever comes first; what counts is
    # whether the revert came after that, and who set get_embed_and_head last.
    position = {step: order.index(step) for step in STEPS}
    imported = min(position["import"], position["other"])
    reverted = position["revert"] > imported
    if reverted:
        assert found["state"] == "reverted"
        assert found["setter"] is None
        assert found["ours"] == []
    else:
        assert found["state"] == "applied"
        assert found["setter"] == "setter"
    # The second plugin wrapped ours if it was there; then its wrapper is left alone, and ours goes on working below it.
    wrapped_ours = not reverted or position["other"] < position["revert"]
    assert found["embed"] == ["other's", ["embed", "head"] if wrapped_ours else None]


def test_another_programs_command_line_is_not_judged(stand_in):
    done = stand_in("import sys; sys.orig_argv = ['python', 'train.py']\n" + CALL)
    assert done.stdout == DELEGATED


def test_a_launch_whose_models_are_not_here_yet_is_not_judged(stand_in):
    argv = ["python", "-m", "sglang.launch_server", "--model", "org/a", "--speculative-algorithm", "EAGLE3"]
    argv += ["--speculative-draft-model-path", "org/b"]
    done = stand_in(f"import sys; sys.orig_argv = {argv}\n" + CALL)
    assert done.stdout == DELEGATED
    assert done.stderr == ""


def test_a_launch_that_is_certain_to_be_wrong_is_refused(stand_in, tmp_path):
    target, draft = good_pair(tmp_path, [1, 4, 9])  # of 8 layers
    argv = ["python", "-m", "sglang.launch_server", "--model", str(target), "--speculative-algorithm", "EAGLE3"]
    argv += ["--speculative-draft-model-path", str(draft)]
    launch = f"import sys; sys.orig_argv = {argv}\n" + CALL
    refused = stand_in(launch, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "ERR_LAYER_ID_RANGE: Layer id 9" in refused.stderr
    assert "This launch stops here, before any weight is read" in refused.stderr
    assert "Traceback" not in refused.stderr
    served = stand_in(launch, EAGLE3_ALLOW_MISWIRED="1")
    assert served.stdout == DELEGATED
    assert "ERR_LAYER_ID_RANGE: Layer id 9" in served.stderr
    assert "serving all the same" in served.stderr


def test_a_check_that_fails_lets_the_launch_go_on(stand_in):
    broken = """
    import sys
    from sglang_eagle3_plugin.runtime import startup
    def broken(words, settings): raise RuntimeError("a fault of ours")
    startup.check_command_line = broken
    sys.orig_argv = ["python", "-m", "sglang.launch_server"]
    """
    done = stand_in(textwrap.dedent(broken) + CALL)
    assert done.stdout == DELEGATED
    assert "the check of the command line failed; the launch goes on" in done.stderr


def test_a_plugin_that_cannot_be_activated_costs_a_line_not_the_server(stand_in):
    broken = """
    from sglang_eagle3_plugin import activation
    def broken(route, settings=None): raise RuntimeError("a fault of ours")
    activation.activate = broken
    """
    done = stand_in(textwrap.dedent(broken) + "import sglang; print(sglang.__version__)")
    assert done.stdout == "0.5.9+stand-in\n"
    assert done.stderr.count("sglang-eagle3-plugin: not active in this process (RuntimeError('a fault of ours'))") == 1
