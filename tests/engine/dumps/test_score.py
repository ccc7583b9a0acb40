import pytest

from .in_environment import run


@pytest.mark.engine
def test_drafts_of_known_worth_score_it(tmp_path):
    run("program_score.py", tmp_path)
