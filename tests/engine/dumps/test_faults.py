"""Two real servers dump into one directory on one small disk, which fills up: both serve on, and each says so once."""

import subprocess

import pytest

from sglang_eagle3_plugin.hidden_states.layout import MANIFEST, SHARD, sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.verify import verify

from ..conftest import OLDEST
from .serving import ask, complete, served

HOSTILE = "../../../tmp/e3-hostile\n\x1b[31m"
ONE, OTHER = (10, 20, 30), (11, 21, 31)


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.engine
@pytest.mark.slow
def test_two_servers_share_a_directory_with_a_hostile_id_and_outlive_a_full_disk(tmp_path, disk):
    directory = disk / "dump"

    def one(name):
        return served(tmp_path / name, OLDEST, EAGLE3_DUMP_DIR=str(directory))[1]

    with one("a") as a, one("b") as b:
        ask(a, [ONE], rid=[HOSTILE])
        ask(b, [OTHER], rid=[HOSTILE])
        complete(directory, [ONE, OTHER])
        (disk / "filler").write_bytes(b"x" * ((2 << 20) - (200 << 10)))
        long = [[(7 * i + k) % 256 for i in range(200)] for k in range(4)]  # 200 tokens of 4 KB
        for server in (a, b):
            before = ask(server, [ONE], 4)
            ask(server, long)
            assert ask(server, [ONE], 4)[0]["output_ids"] == before[0]["output_ids"]
            log = server.place.log.read_text()
            assert log.count("is off in this process, serving goes on") == 1, log[-2000:]
    (disk / "filler").unlink()
    dump = Dump.open(directory)
    assert {sample_key(ONE), sample_key(OTHER)} <= {ref.key for ref in dump.refs}
    assert {ref.request for ref in dump.refs if ref.key == sample_key(OTHER)} == {HOSTILE}
    assert verify(dump) == []
    assert all(MANIFEST.fullmatch(path.name) or SHARD.fullmatch(path.name) for path in directory.iterdir())
    assert len(list(directory.glob("manifest-*"))) == 2
