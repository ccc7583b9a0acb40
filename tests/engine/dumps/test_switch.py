"""The dump of a real server, begun and ended while it serves."""

import pytest

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.server import dump

from ..conftest import RELEASES
from .serving import ask, complete, served

BEFORE, DURING, BETWEEN, AGAIN = ((start, start + 1, start + 2) for start in (10, 20, 30, 40))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_server_that_was_started_without_a_dump_begins_ends_and_begins_another(tmp_path, release, monkeypatch):
    directory = tmp_path / "dump"
    _, server = served(tmp_path, release)
    with server as running:
        monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(running.place.records))

        def says(prompt):
            return ask(running, [prompt], 4)[0]["output_ids"]

        before = says(BEFORE)
        (state,) = dump.switch(running.pid, on=True, directory=directory, boundaries="2,4", url=running.url)
        assert (state.on, state.boundaries, state.problem) == (True, (2, 4), "")
        said = says(DURING)
        complete(directory, [DURING])
        (state,) = dump.switch(running.pid, on=False)
        assert (state.on, state.counts["samples"], state.problem) == (False, 1, "")
        assert says(BEFORE) == before
        says(BETWEEN)
        (state,) = dump.switch(running.pid, on=True, directory=directory, boundaries="all", url=running.url)
        assert (state.on, state.boundaries) == (True, tuple(range(9)))
        says(AGAIN)
        assert says(DURING) == said
        complete(directory, [AGAIN])
        complete(directory, [DURING], times=2)
    found = Dump.open(directory)
    assert [ref.key for ref in found.refs] == [sample_key(ids) for ids in (DURING, AGAIN, DURING)]
    assert [ref.header.boundaries for ref in found.refs] == [(2, 4), tuple(range(9)), tuple(range(9))]
    assert verify(found) == []
    first, _, second = (found.read(ref) for ref in found.refs)
    assert (first.aux == second.aux[:, [2, 4]]).all()
    assert (first.final == second.final).all()
