"""Exports that can't go on say so in a sentence. Torch is a stand-in here; the real one writes in tests/engine/dumps."""

import errno
import resource
import types

import pytest

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import torch_io
from sglang_eagle3_plugin.hidden_states.export import export
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.paths import Alone

from .making import dump, sample


def test_two_exports_never_share_a_directory(tmp_path):
    dump(tmp_path / "dump", [sample([1, 2, 3])])
    out = tmp_path / "out"
    out.mkdir()
    with Alone(out), pytest.raises(UserError, match="another run is writing to"):
        export(Dump.open(tmp_path / "dump"), "pt", out)
    assert [path.name for path in out.iterdir()] == ["eagle3-dump.json"]


def test_a_disk_that_fills_is_the_systems_error_not_torchs(tmp_path, monkeypatch):
    def save(value, file):
        try:
            file.write(value)
            file.flush()
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598") from None

    monkeypatch.setattr(torch_io, "import_torch", lambda purpose: types.SimpleNamespace(save=save))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            torch_io.save_pt(b"x" * 5000, tmp_path / "a.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.errno == errno.EFBIG
    assert not (tmp_path / "a.pt").exists()
