"""The launcher: arguments, reading a log, and processes that never outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, process

LOG = """\
[2026-11-29 17:40:36] Scheduler hit an exception: Traceback (most recent call last):
  File "model_runner.py", line 1, in initialize
AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'

[2026-11-29 17:40:36] Rank 0 scheduler is dead. Please check if there are relevant logs.
Traceback (most recent call last):
  File "connection.py", line 399, in _recv
    raise EOFError
EOFError
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).
"""


def test_the_error_that_matters() -> None:
    wanted = "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'"
    assert engine.last_error(LOG) == wanted
    assert engine.last_error("a\nsomething went wrong\n") == "something went wrong"
    assert engine.last_error("") == "it printed nothing"
    assert engine.last_error("x\ntorch.OutOfMemoryError: none left\n") == "torch.OutOfMemoryError: none left"


def test_arguments_of_a_release() -> None:
    spec = engine.EngineSpec(Path("t"), Path("d"), topk=4, num_steps=2, arguments={"max_total_tokens": 99})
    assert "disable_piecewise_cuda_graph" not in spec.engine_arguments("0.5.9")
    arguments = spec.engine_arguments("0.5.13")
    assert arguments["disable_piecewise_cuda_graph"] is True
    assert arguments["max_total_tokens"] == 99
    assert arguments["speculative_num_draft_tokens"] == 6
    assert "speculative_algorithm" not in engine.EngineSpec(Path("t")).engine_arguments("0.5.13")
    assert spec.stock().environment == {"EAGLE3_PLUGIN": "0"}


def test_flags() -> None:
    assert engine.flags({"log_level": "info", "skip_tokenizer_init": True, "enable_multimodal": False, "port": 1, "x": None}) == [
        "--log-level",
        "info",
        "--skip-tokenizer-init",
        "--port",
        "1",
    ]


def test_our_variables_do_not_leak_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_PLUGIN", "0")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with engine._workplace(engine.EngineSpec(tmp_path, environment={"EAGLE3_STRICT": "1"})) as place:
        assert "EAGLE3_PLUGIN" not in place.variables
        assert place.variables["EAGLE3_STRICT"] == "1"
        assert place.variables["PYTHONPATH"] == str(engine.SITE)
        assert (place.records.stat().st_mode & 0o777) == 0o700
    assert not place.root.exists()


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_behind(tmp_path: Path, ending: type[BaseException] | None) -> None:
    log = tmp_path / "log"
    pids: list[int] = []

    def use() -> None:
        with process.supervised([sys.executable, "-c", FAMILY], os.environ, log) as child:
            while not log.read_text().endswith("\n"):
                time.sleep(0.01)
            pids.extend([child.pid, int(log.read_text())])
            if ending:
                raise ending

    if ending:
        with pytest.raises(ending):
            use()
    else:
        use()
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def in_site(code: str, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(engine.SITE), **variables}
    argv = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_rig_needs_two_keys() -> None:
    code = "import vllm._custom_ops as ops; print(ops.rotary_embedding)"
    assert "No module named 'vllm'" in in_site(code, EAGLE3_RIG="")
    assert "Absent" in in_site(code, EAGLE3_RIG="1")
    assert "No module named 'vllm.logger'" in in_site("import vllm.logger", EAGLE3_RIG="1")


def test_an_absent_kernel_says_its_name() -> None:
    said = in_site("from vllm._custom_ops import rms_norm; rms_norm(1)", EAGLE3_RIG="1")
    assert "NotImplementedError: the rig has no stand-in for vllm._custom_ops.rms_norm" in said


def test_a_hooked_module_is_the_real_one_and_then_changed(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text("def f(): return 1\n")
    said = in_site(
        """
        import sys, inspect
        from eagle3_rig.hooks import Finder
        sys.meta_path.insert(0, Finder({"hooked": lambda module: setattr(module, "g", 2)}, []))
        sys.path.insert(0, sys.argv[1])
        import hooked
        print(hooked.f(), hooked.g, inspect.getsource(hooked.f).strip(), hooked.__spec__.origin.endswith("hooked.py"))
        """,
        str(tmp_path),
        EAGLE3_RIG="",
    )
    assert said.strip() == "1 2 def f(): return 1 True"


def test_a_stand_in_lends_a_module_its_own_names_while_it_is_being_imported(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text("class Norm: own = True\nfrom absent.norms import Norm, Other\n")
    said = in_site(
        """
        import sys
        from eagle3_rig.hooks import Finder
        sys.meta_path.insert(0, Finder({}, ["absent", "absent.norms"], {"absent.norms": "norms"}))
        sys.path.insert(0, sys.argv[1])
        import norms
        print(norms.Norm.own)
        norms.Other()
        """,
        str(tmp_path),
        EAGLE3_RIG="",
    )
    assert said.startswith("True")
    assert "NotImplementedError: the rig has no stand-in for absent.norms.Other" in said
