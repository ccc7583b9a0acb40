"""Environments of releases, with uv played by a function that makes directories."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.rig import environments


class FakeUv:
    """Records calls; `venv` makes the directory, `pip` fails when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.overrides: list[str] = []
        self.failure: BaseException | None = None

    def __call__(self, *arguments: str) -> str:
        self.calls.append(arguments)
        if arguments[0] == "venv":
            Path(arguments[-1], "bin").mkdir(parents=True)
        else:
            if "--override" in arguments:
                self.overrides.append(Path(arguments[arguments.index("--override") + 1]).read_text(encoding="utf-8"))
            if self.failure:
                raise self.failure
        return ""

    @property
    def installs(self) -> list[tuple[str, ...]]:
        return [call for call in self.calls if call[0] == "pip"]


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeUv:
    fake = FakeUv()
    monkeypatch.setattr(environments, "uv", fake)
    monkeypatch.setattr(environments, "NEEDED_GB", 0)
    monkeypatch.setenv("SGLANG_EAGLE3_CACHE", str(tmp_path / "câche"))
    return fake


def test_built_once_and_found_again(uv: FakeUv) -> None:
    said: list[str] = []
    first = environments.ensure("0.5.23", said.append)
    assert environments.ensure("0.5.23", said.append) == first
    assert len(uv.installs) == 1
    assert "sglang==0.5.23" in uv.installs[0]
    assert "--compile-bytecode" in uv.installs[0]
    assert len(said) == 1
    assert environments.built() == ["0.5.23"]
    environments.remove("0.5.23")
    assert environments.built() == []
    assert not first.root.exists()


def test_what_a_release_needs_besides(uv: FakeUv) -> None:
    environments.ensure("0.5.9")
    assert "numpy<2.3" in uv.installs[-1]
    environments.ensure("0.5.18")
    assert "numpy<2.3" not in uv.installs[-1]
    assert uv.overrides == ["cuda-tile ; sys_platform == 'never'\n"]


@pytest.mark.parametrize("failure", [UserError("uv pip failed: no route to host"), KeyboardInterrupt()])
def test_a_half_built_one_is_built_again(uv: FakeUv, failure: BaseException) -> None:
    uv.failure = failure
    with pytest.raises(type(failure)):
        environments.ensure("0.5.9")
    assert environments.built() == []
    leftover = environments.directory("0.5.9") / "half"
    leftover.parent.mkdir(exist_ok=True)
    leftover.touch()
    uv.failure = None
    environments.ensure("0.5.9")
    assert not leftover.exists()
    assert environments.built() == ["0.5.9"]


def test_a_release_that_there_is_not(uv: FakeUv) -> None:
    with pytest.raises(UserError, match="'latest' is not a version"):
        environments.ensure("latest")
    with pytest.raises(UserError, match="is not a version"):
        environments.ensure("../../etc")
    uv.failure = UserError("uv pip failed: Because there is no version of sglang==9.9.9 and you require sglang==9.9.9")
    with pytest.raises(UserError, match=r"has no SGLang 9\.9\.9"):
        environments.ensure("9.9.9")
    assert not environments.directory("9.9.9").exists()


def test_no_room(uv: FakeUv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "NEEDED_GB", 10**9)
    with pytest.raises(UserError, match="make room, or set SGLANG_EAGLE3_CACHE"):
        environments.ensure("0.5.9")


def test_two_at_once_build_one(uv: FakeUv) -> None:
    threads = [threading.Thread(target=environments.ensure, args=("0.5.9",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(uv.installs) == 1


def test_no_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "uv", None)
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sglang-eagle3-plugin\[rig\]'"):
        environments.uv("--version")
    said: list[str] = []
    with pytest.raises(UserError, match="uv is not installed"):
        environments.ensure("0.5.9", said.append)
    assert said == []


def test_what_uv_says_reaches_the_user() -> None:
    with pytest.raises(UserError, match="uv no-such-command failed"):
        environments.uv("no-such-command")
