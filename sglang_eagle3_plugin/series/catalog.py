"""What `patches/` holds: which release takes which series, and how each file looks before, between and after its patches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError

MAP = "releases.json"


@dataclass(frozen=True)
class Entry:
    """One release's series.

    Attributes:
        release: the release.
        tag: its tag upstream.
        directory: where the patches lie.
        files: path in the wheel -> git blob ids: the release's own (None: no such file), after each patch of it, last the final.
    """

    release: str
    tag: str
    directory: Path
    files: dict[str, tuple[str | None, ...]]

    def patches(self) -> list[Path]:
        """The patch files in order.

        Raises:
            UserError: the series names a file that is not there.
        """
        listed = [line.strip() for line in (self.directory / "series").read_text().splitlines() if line.strip()]
        paths = [self.directory / name for name in listed if not name.startswith("#")]
        for path in paths:
            if not path.is_file():
                raise UserError(f"the series in {self.directory} names {path.name}, which is not there; reinstall the plugin")
        return paths


def root() -> Path:
    """The directory of the series: beside the package in a checkout, inside it in an installation.

    Raises:
        UserError: neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_patches", package.parent / "patches"):
        if (candidate / MAP).is_file():
            return candidate
    raise UserError(f"the patch series are missing from this installation ({package}); reinstall sglang-eagle3-plugin")


def load(directory: Path | None = None) -> dict[str, Entry]:
    """Read the map, oldest release first.

    Raises:
        UserError: it is missing or damaged.
    """
    where = directory or root()
    known = read_map(where)
    try:
        return {
            release: Entry(release, raw["tag"], where / raw["series"], {p: tuple(ids) for p, ids in raw["files"].items()})
            for release, raw in known.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where / MAP} has an entry that is not understood ({error}); reinstall the plugin") from error


def read_map(directory: Path) -> dict[str, Any]:
    """The map as it is written; empty where there is none."""
    path = directory / MAP
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it or reinstall the plugin") from error
    return known if isinstance(known, dict) else {}


def entry(entries: dict[str, Entry], release: str) -> Entry:
    """One release's entry.

    Raises:
        UserError: there is no series for it.
    """
    name = release.removeprefix("v")
    if name not in entries:
        releases = list(entries)
        raise UserError(
            f"there is no series for SGLang {release}; there is one for each release from {releases[0]} to {releases[-1]}"
        )
    return entries[name]
