"""What stands in for the tree kernels of older releases does what SGLang's own kernels of the newest do."""

import os
import subprocess
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine

pytestmark = pytest.mark.engine


def test_plain_torch_agrees_with_sglangs_triton(env0523):
    program = Path(__file__).with_name("program_tree_kernels.py")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "EAGLE3_PLUGIN": "0"}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run([env0523.python, program, engine.SITE], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "same 48"
