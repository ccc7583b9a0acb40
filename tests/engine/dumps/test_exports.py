import pytest

from .in_environment import run, trainers


@pytest.mark.engine
def test_each_trainers_own_reader_loads_our_export(tmp_path):
    run("program_exports.py", tmp_path, path=[trainers()])
