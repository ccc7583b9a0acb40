"""`patches check|apply|revert` on every kind of tree, and killed at every step, on a small series of its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin.cli import patches as cli
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series import catalog, export, transaction, tree
from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.source import Source

FILES = {
    "sglang/srt/models/one.py": "".join(f"a{n} = {n}\n" for n in range(30)),
    "sglang/srt/models/two.py": "b = 1\nc = 2\n",
    "sglang/srt/server_args.py": "# not touched\n",
}
ADDED = "sglang/srt/speculative/new.py"


def _change(name: str, transform: Callable[[Source], dict[str, str]]) -> Change:
    return Change(name, f"Change {name}", "why", "tested", "none", "never", transform)


def _edit(path: str, old: str, new: str) -> Callable[[Source], dict[str, str]]:
    return lambda source: {path: (source.text(path) or "").replace(old, new)}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases' series: 1.0, and 2.0 whose files differ."""
    root, known = tmp_path_factory.mktemp("patches"), {}
    changes = (
        _change("first", _edit("sglang/srt/models/one.py", "a3 = 3\n", "a3 = 33\n")),
        _change("second", lambda s: {**_edit("sglang/srt/models/one.py", "a25 = 25\n", "a25 = 0\n")(s), ADDED: "d = 4\n"}),
        _change("third", _edit("sglang/srt/models/two.py", "b = 1\n", "b = 11\n")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "REGISTRY", changes)
        for release, header in (("1.0", ""), ("2.0", "z = 0\n")):
            files = {path: header + text for path, text in FILES.items()}
            export.write(export.build(Source(release, list(files), files.get)), root, known)
    export.write_map(root, known)
    return root


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An unpacked release 1.0."""
    for path, text in FILES.items():
        file = tmp_path / "tree" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "tree" / "sglang" / "version.py").write_text('__version__ = "1.0"\n')
    return tmp_path / "tree"


@pytest.fixture
def run(series: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Call `patches <arguments>` as the shell would: exit code, output, and the sentence of a refusal."""
    monkeypatch.setattr(catalog, "root", lambda: series)

    def call(*arguments: object) -> SimpleNamespace:
        result = CliRunner().invoke(cli.command, [str(a) for a in arguments], standalone_mode=False)
        if isinstance(result.exception, UserError):
            return SimpleNamespace(code=2, said=str(result.exception), json=None)
        if result.exception:
            raise result.exception
        value = json.loads(result.output) if "--json" in arguments else None
        return SimpleNamespace(code=result.return_value, said=result.output, json=value)

    return call


def _snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime_ns)
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def _state(run: Callable[..., Any], site: Path, *more: str) -> str:
    return str(run("check", "--tree", site, "--json", *more).json["state"])


def test_clean_then_applied_then_exactly_as_before(run: Callable[..., Any], site: Path) -> None:
    before = _snapshot(site)
    assert run("check", "--tree", site).code == 0
    assert _state(run, site) == "clean"
    assert _snapshot(site) == before, "check writes nothing"
    assert run("apply", "--tree", site).code == 0
    assert "a3 = 33" in (site / "sglang/srt/models/one.py").read_text()
    assert (site / ADDED).read_text() == "d = 4\n"
    assert run("check", "--tree", site).code == 0
    assert _state(run, site) == "applied"
    again = run("apply", "--tree", site)
    assert again.code == 0
    assert "nothing to do" in again.said
    assert run("revert", "--tree", site).code == 0
    assert _snapshot(site) == before, "content, modes and times"
    assert run("apply", "--tree", site).code == 0
    assert _state(run, site) == "applied"


def test_revert_without_a_record_reverses_the_patches(run: Callable[..., Any], site: Path, series: Path) -> None:
    for patch in sorted((series / "1.0").glob("*.patch")):
        subprocess.run(["patch", "-s", "-p2", "-i", patch], cwd=site, check=True)
    assert _state(run, site) == "applied"
    assert run("revert", "--tree", site).code == 0
    assert _state(run, site) == "clean"
    assert not (site / ADDED).exists()


def test_a_partly_applied_tree_is_named_refused_and_can_be_taken_back(run: Callable[..., Any], site: Path) -> None:
    (site / "sglang/srt/models/two.py").write_text("b = 11\nc = 2\n")
    found = run("check", "--tree", site, "--json")
    assert found.code == 1
    assert found.json["state"] == "partly applied"
    refused = run("apply", "--tree", site)
    assert refused.code == 2
    assert "patches revert" in refused.said
    assert run("revert", "--tree", site).code == 0
    assert _state(run, site) == "clean"


def test_some_patches_of_the_series_are_partly_applied_too(run: Callable[..., Any], site: Path, series: Path) -> None:
    subprocess.run(["patch", "-s", "-p2", "-i", series / "1.0" / "0001-first.patch"], cwd=site, check=True)
    assert _state(run, site) == "partly applied"
    before = _snapshot(site)
    assert "patch -R" in run("revert", "--tree", site).said
    assert _snapshot(site) == before


def test_the_wrong_release_is_refused(run: Callable[..., Any], site: Path) -> None:
    before = _snapshot(site)
    assert _state(run, site, "--release", "2.0") == "wrong release"
    refused = run("apply", "--tree", site, "--release", "2.0")
    assert refused.code == 2
    assert "is not SGLang 2.0" in refused.said
    assert "there is no series for SGLang 3.0" in run("check", "--tree", site, "--release", "3.0").said
    assert _snapshot(site) == before


def test_a_fork_is_refused_unless_allowed_and_its_own_lines_stay(run: Callable[..., Any], site: Path) -> None:
    one = site / "sglang/srt/models/one.py"
    one.write_text(one.read_text().replace("a15 = 15\n", "# the fork's own line\na15 = 15\n"))
    before = _snapshot(site)
    assert _state(run, site) == "modified"
    assert "--allow-modified" in run("apply", "--tree", site).said
    assert _snapshot(site) == before
    assert run("apply", "--tree", site, "--allow-modified").code == 0
    assert "# the fork's own line" in one.read_text()
    assert "a3 = 33" in one.read_text()
    assert run("revert", "--tree", site).code == 0
    assert _snapshot(site) == before


def test_a_fork_that_the_patches_do_not_fit_is_left_as_it_was(run: Callable[..., Any], site: Path) -> None:
    one = site / "sglang/srt/models/one.py"
    one.write_text(one.read_text().replace("a3 = 3\n", "a3 = 'mine'\n"))
    before = _snapshot(site)
    refused = run("apply", "--tree", site, "--allow-modified")
    assert refused.code == 2
    assert "does not fit" in refused.said
    assert _snapshot(site) == before


def test_a_file_changed_after_the_apply_is_not_lost_by_revert(run: Callable[..., Any], site: Path) -> None:
    run("apply", "--tree", site)
    (site / "sglang/srt/models/two.py").write_text("mine\n")
    before = _snapshot(site)
    refused = run("revert", "--tree", site)
    assert refused.code == 2
    assert "two.py was changed after" in refused.said
    assert _snapshot(site) == before


def _git(where: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=where, check=True, capture_output=True)


@pytest.fixture
def checkout(site: Path, tmp_path: Path) -> Path:
    """A checkout as upstream lays it out: `python/sglang`."""
    root = tmp_path / "checkout"
    (root / "python").mkdir(parents=True)
    (site / "sglang").rename(root / "python" / "sglang")
    _git(root, "init", "-q")
    _git(root, "add", "-A")
    _git(root, "commit", "-qm", "1.0")
    return root


def test_a_checkout_clean_dirty_and_committed(run: Callable[..., Any], checkout: Path) -> None:
    assert run("check", "--tree", checkout, "--json").json["kind"] == "git checkout"
    assert run("apply", "--tree", checkout).code == 0
    assert ".eagle3" not in subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True).stdout
    assert run("revert", "--tree", checkout).code == 0
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True).stdout
    two = checkout / "python/sglang/srt/models/two.py"
    two.write_text(two.read_text() + "# work in progress\n")
    assert _state(run, checkout) == "dirty"
    assert "uncommitted changes" in run("apply", "--tree", checkout).said
    _git(checkout, "commit", "-qam", "fork")
    assert _state(run, checkout) == "modified"


def test_git_am_takes_the_series(run: Callable[..., Any], checkout: Path, series: Path) -> None:
    names = (series / "1.0" / "series").read_text().split()
    _git(checkout, "am", "-q", *(str(series / "1.0" / name) for name in names))
    assert _state(run, checkout) == "applied"


def test_a_tree_nested_in_another_repository_is_patched_and_the_repository_left_alone(
    run: Callable[..., Any], site: Path, tmp_path: Path
) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*\n")
    found = run("check", "--tree", site, "--json").json
    assert (found["kind"], found["repository"]) == ("unpacked wheel", str(tmp_path))
    assert run("apply", "--tree", site).code == 0
    assert "a3 = 33" in (site / "sglang/srt/models/one.py").read_text(), "git apply would have skipped it silently"


def test_an_installation_wants_in_place(run: Callable[..., Any], site: Path) -> None:
    (site / "sglang-1.0.dist-info").mkdir()
    (site / "sglang-1.0.dist-info" / "INSTALLER").write_text("pip\n")
    before = _snapshot(site)
    assert run("check", "--tree", site).code == 0
    assert "--in-place" in run("apply", "--tree", site).said
    assert _snapshot(site) == before
    assert run("apply", "--tree", site, "--in-place").code == 0
    assert "--in-place" in run("revert", "--tree", site).said
    assert run("revert", "--tree", site, "--in-place").code == 0
    assert _snapshot(site) == before


def test_a_cache_that_shares_files_by_hard_links_is_not_changed(run: Callable[..., Any], site: Path, tmp_path: Path) -> None:
    shared = tmp_path / "cache.py"
    os.link(site / "sglang/srt/models/one.py", shared)
    run("apply", "--tree", site)
    assert shared.read_text() == FILES["sglang/srt/models/one.py"]


def test_read_only_files_and_directories_are_refused(run: Callable[..., Any], site: Path) -> None:
    two = site / "sglang/srt/models/two.py"
    two.chmod(0o444)
    before = _snapshot(site)
    refused = run("apply", "--tree", site)
    assert refused.code == 2
    assert "two.py is read-only" in refused.said
    assert _snapshot(site) == before
    two.chmod(0o644)
    two.parent.chmod(0o555)
    assert "can't be written" in run("apply", "--tree", site).said
    two.parent.chmod(0o755)


def test_crlf_line_ends_are_kept(run: Callable[..., Any], site: Path) -> None:
    one = site / "sglang/srt/models/one.py"
    one.write_bytes(one.read_bytes().replace(b"\n", b"\r\n"))
    before = _snapshot(site)
    found = run("check", "--tree", site, "--json").json
    assert (found["state"], found["crlf"]) == ("clean", ["sglang/srt/models/one.py"])
    assert run("apply", "--tree", site).code == 0
    assert b"a3 = 33\r\n" in one.read_bytes()
    assert one.read_bytes().count(b"\n") == one.read_bytes().count(b"\r\n")
    assert _state(run, site) == "applied"
    assert run("revert", "--tree", site).code == 0
    assert _snapshot(site) == before


def test_what_is_no_tree_is_named(run: Callable[..., Any], tmp_path: Path) -> None:
    assert "there is no directory" in run("check", "--tree", tmp_path / "absent").said
    assert "there is no sglang/srt" in run("check", "--tree", tmp_path).said


def test_list_and_show_name_releases_patches_and_messages(run: Callable[..., Any]) -> None:
    assert [(row["release"], row["patches"]) for row in run("list", "--json").json] == [
        ("1.0", ["first", "second", "third"]),
        ("2.0", ["first", "second", "third"]),
    ]
    shown = run("show", "1.0")
    assert "Change second" in shown.said
    assert "Upstream: none" in shown.said
    assert "+a3 = 33" in run("show", "1.0", "first").said
    assert "it has first, second, third" in run("show", "1.0", "fourth").said


def test_export_without_the_wheel_says_where_to_get_it(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_EAGLE3_CACHE", str(tmp_path))
    refused = run("export", "--release", "1.0", "--check")
    assert refused.code == 2
    assert "pip download" in refused.said


def test_export_writes_the_same_bytes_whatever_git_is_configured_to(
    series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text(
        "[core]\nautocrlf = true\n[diff]\nnoprefix = true\nalgorithm = patience\ncontext = 7\nmnemonicPrefix = true\n"
        "[format]\nattach = x\nsignature = me\nnumbered = true\nsuffix = .txt\nsubjectPrefix = ME\n[user]\nname = me\nemail = m@e\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "me")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setattr(export, "REGISTRY", (_change("first", _edit("sglang/srt/models/one.py", "a3 = 3\n", "a3 = 33\n")),))
    written = export.build(Source("1.0", list(FILES), FILES.get)).patches
    assert (
        written["0001-first.patch"].split("\nSubject", 1)[1]
        == ((series / "1.0" / "0001-first.patch").read_text().split("\nSubject", 1)[1])
    )
    assert written["0001-first.patch"].startswith("From 0000000000000000000000000000000000000000 ")
    assert "From: sglang-eagle3-plugin <" in written["0001-first.patch"]


@pytest.mark.parametrize("missing", ["git", "gitpython"])
def test_what_is_missing_is_named_with_its_remedy(
    run: Callable[..., Any], site: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "git":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setitem(sys.modules, "git", None)
    refused = run("apply", "--tree", site)
    assert refused.code == 2
    assert ("install git" if missing == "git" else "pip install 'sglang-eagle3-plugin[patches]'") in refused.said


@pytest.mark.parametrize("atomic", [True, False], ids=["exchange", "journal"])
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_killed_at_any_step_the_tree_is_as_it_was_or_fully_changed(
    run: Callable[..., Any], site: Path, tmp_path: Path, series: Path, monkeypatch: pytest.MonkeyPatch, action: str, atomic: bool
) -> None:
    if not atomic:

        def cannot(one: Path, other: Path) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(transaction, "_exchange", cannot)
    entries = catalog.load(series)
    clean = _snapshot(site)
    # What the series gives is computed once, and the tree before each kill is a copy: the test is about the writing.
    texts_before = {path: tree.open_tree(site).read(path) for path in entries["1.0"].files}
    texts_after = transaction.patch(entries["1.0"], texts_before)
    monkeypatch.setattr(transaction, "patch", lambda entry, before: texts_after)
    if action == "revert":
        run("apply", "--tree", site)
    start, template = _texts(site), tmp_path / "template"
    shutil.copytree(site, template)
    run(action, "--tree", site)
    end = _texts(site)

    seen = set()
    for step in range(10_000):
        shutil.rmtree(site)
        shutil.copytree(template, site)
        finished = _killed_at(step, lambda: _act(action, site, entries))
        state, texts = tree.examine(tree.open_tree(site), entries).state.value, _texts(site)
        seen.add(state)
        if state == "interrupted":
            assert not atomic
        else:
            assert texts in (start, end), f"killed at step {step}: neither as it was nor fully changed"
            assert (texts == end) == (state == ("applied" if action == "apply" else "clean")), f"check lies at step {step}"
        assert run("revert", "--tree", site).code == 0
        assert _snapshot(site) == clean, f"what was killed at step {step} is not taken back exactly"
        if finished:
            break
    assert step > 20
    assert {"clean", "applied"} <= seen
    assert ("interrupted" in seen) == (not atomic)


def _act(action: str, site: Path, entries: dict[str, catalog.Entry]) -> None:
    opened = tree.open_tree(site)
    report = tree.examine(opened, entries)
    (transaction.apply if action == "apply" else transaction.revert)(opened, report)


def _texts(site: Path) -> dict[str, bytes]:
    """The files of the package that Python would import."""
    return {str(p.relative_to(site)): p.read_bytes() for p in sorted(site.rglob("*.py")) if ".eagle3" not in str(p)}


def _killed_at(step: int, act: Callable[[], None]) -> bool:
    """Carry an action out in a child that kills itself before its n-th change of the file system; True if it came to its end."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event in ("os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.utime")
            inside = event == "open" and (".eagle3" in str(arguments[0]) or str(arguments[0]).endswith("sglang"))
            if writes or inside:
                count += 1
                if count > step:
                    os.kill(os.getpid(), signal.SIGKILL)

        original = transaction._locked

        def locked(opened: tree.Tree) -> Any:
            sys.addaudithook(hook)  # from here on the tree is written
            return original(opened)

        transaction._locked = locked  # type: ignore[assignment]
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)
