"""The facts of many releases as two tables: written so that a new release adds lines and changes none that hold still."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import releases
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import write_text
from sglang_eagle3_plugin.releases import ClassFacts
from sglang_eagle3_plugin.survey import archive as archives
from sglang_eagle3_plugin.survey import facts as survey_facts
from sglang_eagle3_plugin.survey.archive import Archive
from sglang_eagle3_plugin.survey.modules import ModuleSummary, summarize

_DEFAULTS = {f.name: f.default for f in fields(ClassFacts) if f.name != "module"}
WORKERS = 2


@dataclass(frozen=True)
class Surveyed:
    """One release's rows: facts of the whole as they are written, and of each class."""

    whole: dict[str, Any]
    classes: dict[str, dict[str, Any]]


def survey(wheels: Mapping[str, Path], tell: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Surveyed]:
    """Survey wheels. A file that several releases share is parsed once.

    Args:
        wheels: release -> its wheel.
        tell: called with (files done, files in all).

    Returns:
        Release -> rows. A wheel that cannot be opened has no classes, and its problem in ``whole``.
    """
    found: dict[str, Surveyed] = {}
    with ExitStack() as stack:
        opened: dict[str, Archive] = {}
        for release, wheel in wheels.items():
            try:
                opened[release] = stack.enter_context(archives.of_wheel(wheel))
            except UserError as error:
                # The file's name alone: the table must not depend on where the cache lies.
                found[release] = broken(wheel, str(error).replace(str(wheel.parent) + os.sep, ""))
        summaries = _summarize_all(opened.values(), tell)
        for release, archive in opened.items():
            modules = survey_facts.summaries_of(archive, lambda path, package, a=archive: summaries[_key(a, path)])  # type: ignore[misc]
            found[release] = rows(survey_facts.of_archive(archive, modules), wheels[release])
    return {release: found[release] for release in wheels}


def rows(release: survey_facts.Release, wheel: Path | None) -> Surveyed:
    """A release's facts as they are written."""
    whole: dict[str, Any] = {}
    if wheel is not None:
        whole = {"wheel": wheel.name, "sha256": archives.digest(wheel)}
    facts = asdict(release.facts)
    facts.update(calls=list(release.facts.calls), problems=list(release.facts.problems))
    facts["drafts"] = {name: list(read) for name, read in release.facts.drafts.items()}
    classes = {
        name: {key: value for key, value in asdict(c).items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
        for name, c in release.classes.items()
    }
    return Surveyed({**whole, "facts": facts}, classes)


def broken(wheel: Path, why: str) -> Surveyed:
    """The rows of a release whose wheel cannot be read."""
    facts = {
        "entry_point": False, "graph_ids": "configured", "eager_ids": "configured", "calls": [], "missing_setter": "AttributeError",
        "drafts": {}, "problems": [why],
    }  # fmt: skip
    return Surveyed({"wheel": wheel.name, "sha256": "", "facts": facts}, {})


def load(directory: Path) -> dict[str, Surveyed]:
    """Read the tables back; an empty directory is an empty survey."""
    try:
        whole = json.loads((directory / "releases.json").read_text(encoding="utf-8"))["releases"]
        runs = json.loads((directory / "classes.json").read_text(encoding="utf-8"))["classes"]
    except FileNotFoundError:
        return {}
    names = list(whole)
    classes: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    for class_name, steps in runs.items():
        starts = [names.index(step["since"]) for step in steps] + [len(names)]
        for step, start, end in zip(steps, starts, starts[1:], strict=False):
            if not step.get("absent"):
                values = {key: value for key, value in step.items() if key != "since"}
                for name in names[start:end]:
                    classes[name][class_name] = values
    return {name: Surveyed(whole[name], classes[name]) for name in names}


def save(directory: Path, survey_of: Mapping[str, Surveyed]) -> None:
    """Write the tables, each whole or not at all. The same survey gives the same bytes."""
    names = sorted(survey_of, key=lambda name: releases.order(name) or ())
    whole = {name: survey_of[name].whole for name in names}
    class_names = sorted({c for s in survey_of.values() for c in s.classes})
    runs = {class_name: _runs(names, [survey_of[n].classes.get(class_name) for n in names]) for class_name in class_names}
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "releases.json", _lines("releases", {name: [entry] for name, entry in whole.items()}, single=True))
    write_text(directory / "classes.json", _lines("classes", runs))


def _runs(names: Sequence[str], facts: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    for name, value in zip(names, facts, strict=True):
        if value != last:
            steps.append({"since": name, **(value if value is not None else {"absent": True})})
        last = value
    return steps


def _lines(top: str, table: Mapping[str, Sequence[dict[str, Any]]], single: bool = False) -> str:
    """JSON with one entry a line, for diffs that show what changed."""
    blocks = []
    for name, entries in table.items():
        lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
        body = lines[0] if single else "[\n   " + ",\n   ".join(lines) + "\n  ]"
        blocks.append(f"  {json.dumps(name)}: {body}")
    return f'{{\n "{top}": {{\n' + ",\n".join(blocks) + "\n }\n}\n"


def _key(archive: Archive, path: str) -> tuple[str, int | None, int]:
    return (path.rsplit("/", 1)[0], *archive.sizes[path])


def _leave_interrupts_to_the_parent() -> None:
    """In a worker: a terminal's Ctrl-C reaches every process of the group, and each worker would print a traceback of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _summarize_all(opened: Iterable[Archive], tell: Callable[[int, int], None]) -> dict[tuple[str, int | None, int], ModuleSummary]:
    first: dict[tuple[str, int | None, int], tuple[Archive, str]] = {}
    for archive in opened:
        for path in archive.paths(survey_facts.MODELS):
            first.setdefault(_key(archive, path), (archive, path))
    found: dict[tuple[str, int | None, int], ModuleSummary] = {}
    with ProcessPoolExecutor(WORKERS, initializer=_leave_interrupts_to_the_parent) as pool:
        keys = list(first)
        # In slices, so that no more than one slice of source text is held at a time.
        for start in range(0, len(keys), 64):
            batch = keys[start : start + 64]
            texts = []
            for key in batch:
                archive, path = first[key]
                try:
                    texts.append((key, archive.text(path), ""))
                except ValueError as error:
                    texts.append((key, "", str(error).removeprefix(path).strip()))
            readable = [(key, text) for key, text, problem in texts if not problem]
            packages = [key[0].replace("/", ".") for key, _ in readable]
            done = pool.map(summarize, [text for _, text in readable], packages, chunksize=8)
            found.update(zip([key for key, _ in readable], done, strict=True))
            found.update({key: ModuleSummary(problem=problem) for key, _, problem in texts if problem})
            tell(min(start + 64, len(keys)), len(keys))
    return found
