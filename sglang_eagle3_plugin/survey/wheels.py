"""SGLang's wheels in the cache: which there are, by the index of ``sglang`` alone; fetched by name and version with pip."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sglang_eagle3_plugin import cache, releases
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.survey.archive import digest

OLDEST = Version("0.4.5.post3")
"""The first release in the matrix: the first with EAGLE-3."""
AT_ONCE = 2
_SIMPLE = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class Listed:
    """A release's wheel, as the index lists it.

    Attributes:
        filename: of the one wheel that is looked at (their Python files are the same for every platform).
        sha256: in hex; empty where it is not known.
    """

    filename: str
    sha256: str


def listing(get: Callable[[str], str] | None = None) -> dict[str, Listed]:
    """Ask the index for the releases of ``sglang``: final ones from ``OLDEST`` on, oldest first.

    Args:
        get: (url) -> the page's text; the network unless given.

    Raises:
        UserError: the index cannot be reached, or answers something else.
    """
    url = f"{_index().rstrip('/')}/sglang/"
    try:
        page = json.loads((get or _get)(url))
        files = [(f["filename"], f["hashes"].get("sha256", ""), bool(f.get("yanked"))) for f in page["files"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the package index at {url} did not answer ({type(error).__name__}); known releases still work") from error
    best: dict[Version, tuple[tuple[int, ...], Listed]] = {}
    for filename, sha256, yanked in files:
        try:
            _, version, _, tags = parse_wheel_filename(filename)
        except ValueError:
            continue  # a source distribution
        if version < OLDEST or version.is_prerelease or yanked:
            continue
        names = {str(tag) for tag in tags}
        rank = (0 if "py3-none-any" in names else 1, *(0 if w in " ".join(names) else 1 for w in ("cp311", "manylinux", "x86_64")))
        if version not in best or (rank, filename) < (best[version][0], best[version][1].filename):
            best[version] = (rank, Listed(filename, sha256))
    return {str(version): best[version][1] for version in sorted(best)}


def _index() -> str:
    """The package index that this environment's client is set to use."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name]
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if configured.returncode == 0 and configured.stdout.strip():
        return configured.stdout.strip()
    try:
        from pip._internal.models.index import PyPI
    except ImportError as error:
        raise UserError(f"{sys.executable} has no pip, whose index is asked; pip install 'sglang-eagle3-plugin[rig]'") from error
    return str(PyPI.simple_url)


def recorded() -> dict[str, Listed]:
    """The releases that the committed tables know, with their wheels."""
    return {name: Listed(*releases.wheel_of(name)) for name in releases.known_releases()}


def fetch(listed: Mapping[str, Listed], tell: Callable[[str], None] = lambda release: None) -> dict[str, Path | str]:
    """Have the wheels of releases in the cache, two downloads at a time. What is there with the right hash is not fetched again.

    Args:
        listed: release -> its wheel.
        tell: called with each release that is done.

    Returns:
        Release -> its wheel, or one line that says why there is none.
    """

    for left_over in cache.directory("wheels").glob(".fetching-*"):  # of a survey that was killed; a running one is younger
        if time.time() - left_over.stat().st_mtime > 3600:
            shutil.rmtree(left_over, ignore_errors=True)

    def one(release: str) -> tuple[str, Path | str]:
        try:
            found: Path | str = ensure(release, listed[release])
        except UserError as error:
            found = str(error)
        tell(release)
        return release, found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = dict(pool.map(one, listed))
    return {release: done[release] for release in listed}


def ensure(release: str, listed: Listed | None = None) -> Path:
    """Have a release's wheel in the cache.

    Raises:
        UserError: it is not there and cannot be fetched, or its hash is wrong.
    """
    directory = cache.directory("wheels")
    wanted = listed or recorded().get(release)
    path = directory / wanted.filename if wanted else next(iter(sorted(directory.glob(f"sglang-{release}-*.whl"))), None)
    if path is not None and path.is_file() and (wanted is None or not wanted.sha256 or digest(path) == wanted.sha256):
        return path
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as scratch:
        got = _download(release, Path(scratch), wanted.filename if wanted else "")
        if wanted is not None and wanted.sha256 and digest(got) != wanted.sha256:
            raise UserError(f"the wheel {got.name} has another hash than the index lists; it was not kept, try again")
        kept = directory / got.name
        got.replace(kept)
    return kept


def _get(url: str) -> str:
    answer = httpx.get(url, headers={"Accept": _SIMPLE}, timeout=60, follow_redirects=True)
    answer.raise_for_status()
    return answer.text


def _download(release: str, scratch: Path, filename: str) -> Path:
    try:
        version = str(Version(release))
    except InvalidVersion:
        raise UserError(f"{release!r} is no version of SGLang; give one like 0.5.9") from None
    arguments = ["download", "--no-deps", "--quiet", "--only-binary=:all:", "--dest", str(scratch)]
    if filename and "none-any" not in filename:
        _, _, _, tags = parse_wheel_filename(filename)
        tag = sorted(tags, key=str)[0]
        python = tag.interpreter.removeprefix("cp")
        arguments += ["--implementation=cp", f"--python-version={python}", f"--abi={tag.abi}", f"--platform={tag.platform}"]
    else:
        arguments += ["--python-version=3.11", "--platform=any"]
    done = subprocess.run([*_pip(), *arguments, f"sglang=={version}"], capture_output=True, text=True, check=False)
    found = sorted(scratch.glob("*.whl"))
    if done.returncode or len(found) != 1:
        why = " ".join((done.stderr or done.stdout).strip().splitlines()[-1:])[:200]
        raise UserError(f"sglang {version} cannot be downloaded ({why or 'pip gave no wheel'}); see to that, and run it again")
    return found[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if shutil.which("pip"):
        return ["pip"]
    if shutil.which("uv"):
        return ["uv", "run", "--no-project", "--with", "pip", "python", "-m", "pip"]
    raise UserError("neither pip nor uv is here to download wheels with; install one of them")


def releases_in(names: Iterable[str], listed: Mapping[str, Listed]) -> dict[str, Listed]:
    """The listed wheels of some releases; a name that the index does not have is refused.

    Raises:
        UserError: naming the release.
    """
    missing = [name for name in names if name not in listed]
    if missing:
        raise UserError(f"the package index has no SGLang {missing[0]}; give a released version, like 0.5.9")
    return {name: listed[name] for name in names}
