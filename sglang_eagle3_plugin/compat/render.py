"""The matrix as pages: Markdown to read in a repository, HTML to filter. Both follow from the data alone, to the byte."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.compat import matrix, ran
from sglang_eagle3_plugin.compat.matrix import Cell, Step
from sglang_eagle3_plugin.paths import write_text

LEVELS = {
    support.NATIVE: "works unmodified, and one list of layer ids gives one wiring. Whether it is the draft's, depends on the rule.",
    support.REWIRED: "works with the plugin, which corrects the boundaries: stock captures the default ones inside CUDA graphs.",
    support.PLUGIN: "works with the plugin; unmodified it fails.",
    support.BROKEN: "fails, and the plugin is not known to help.",
    support.ABSENT: "the release has no such class.",
}
NOTES = (
    "Layer ids: how the class's own setter turns the ids of a draft's config into capture boundaries. Boundary k is the residual "
    "stream entering decoder layer k.",
    "Evidence ran: a real engine served it. Executed: the release's own setter was run on stand-ins. Read: from its files alone; "
    "what the plugin does is then a prediction.",
    "Up to 0.5.10.post1 the plugin is reached by a .pth file, from 0.5.11 on by SGLang's plugin entry point.",
    "For one draft and target: sglang-eagle3 compat --draft DIR --target DIR.",
)
MARKDOWN, PAGE = "MATRIX.md", "matrix.html"
MARKS = ("<!-- matrix, written by `sglang-eagle3 compat render` -->", "<!-- end of matrix -->")
"""Around the summary in a README beside the directory of the pages."""
_KNOWN_BY = "KimiK25ForConditionalGeneration"


def render(directory: Path) -> None:
    """Write both pages into a directory, and the summary into the README beside it, if that has a place for it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / MARKDOWN, markdown())
    write_text(directory / PAGE, page())
    beside = directory.resolve().parent / "README.md"
    if beside.is_file() and (before := beside.read_text(encoding="utf-8")) != (after := readme(before)):
        write_text(beside, after)


def readme(text: str) -> str:
    """A README's text with the summary between its marks; as it was where it has none."""
    begin, end = MARKS
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        return text
    return f"{head}{begin}\n\n{summary()}\n{end}{rest.partition(end)[2]}"


def summary() -> str:
    """How many classes of each kind of release are served, and how: one row where an answer changed much."""
    runs = ran.load()
    names = releases.known_releases()
    levels = (support.NATIVE, support.REWIRED, support.PLUGIN, support.BROKEN)
    lines = [
        "| release | classes | " + " | ".join(f"`{level}`" for level in levels) + f" | `{_KNOWN_BY}` | ran here |",
        "|---|---|" + "---|" * len(levels) + "---|---|",
    ]
    for name in (name for name in names if name in runs):
        found = [matrix.cell(name, c, runs) for c in releases.class_names()]
        counts = [sum(cell.level == level for cell in found) for level in levels]
        known = matrix.cell(name, _KNOWN_BY, runs)
        cells = [name, sum(counts), *counts, f"{known.level}, {known.evidence}" if known.level != support.ABSENT else "absent"]
        lines.append("| " + " | ".join(map(str, [*cells, len(runs[name])])) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The HTML page: one file, nothing loaded from elsewhere."""
    runs = ran.load()
    names = releases.known_releases()
    position = {name: i for i, name in enumerate(names)}
    reasons: dict[str, int] = {}

    def step(one: Step) -> dict[str, Any]:
        cell = one.cell
        entry: dict[str, Any] = {"first": position[one.first], "last": position[one.last], "level": cell.level}
        entry.update(rule=cell.rule, why=reasons.setdefault(cell.why, len(reasons)), evidence=cell.evidence, command=cell.command)
        entry.update({key: value for key, value in (("date", cell.date), ("edges", _edges(cell))) if value})
        return entry

    classes = [{"name": name, "steps": [step(s) for s in matrix.steps(name, runs)]} for name in releases.class_names()]
    data = {
        "about": f"{len(classes)} model classes, {len(names)} releases of SGLang, {names[0]} to {names[-1]}.",
        "levels": LEVELS,
        "notes": NOTES,
        "releases": names,
        "activation": ["entry point" if releases.release_facts(n).entry_point else ".pth file" for n in names],
        "rules": _rules(),
        "why": list(reasons),
        "classes": classes,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    template = resources.files("sglang_eagle3_plugin").joinpath("data/compat_page.html").read_text(encoding="utf-8")
    return template.replace("@DATA@", text)


def markdown() -> str:
    """The Markdown page."""
    runs = ran.load()
    names = releases.known_releases()
    lines = [
        "# EAGLE-3 on SGLang: what serves what",
        "",
        f"{len(releases.class_names())} model classes, {len(names)} releases, {names[0]} to {names[-1]}. "
        f"[{PAGE}]({PAGE}) is the same with a filter.",
        "Written by `sglang-eagle3 compat survey` and `compat run`; don't edit.",
        "",
        "## Levels",
        "",
        *(f"- `{level}`: {text}" for level, text in LEVELS.items()),
        "",
        *(f"- {note}" for note in NOTES),
        "",
        "## Layer-id rules",
        "",
        *(f"- `{name}`: {text}" for name, text in _rules().items()),
        "",
        "## Releases",
        "",
        "| from | plugin reached by | ids inside CUDA graphs | a class without setter ends in | draft classes |",
        "|---|---|---|---|---|",
        *_release_rows(),
        "",
        "## Runs",
        "",
        "Real engines on a machine without a GPU (CUDA graphs off). A draft made for boundaries "
        f"{', '.join(map(str, ran.BOUNDARIES))} of 8, ids {', '.join(map(str, ran.IDS))} in the output convention; "
        f"acceptance length {ran.NUM_STEPS + 1} is all drafts accepted.",
        "",
        "| release | class | stock | with the plugin | date | command |",
        "|---|---|---|---|---|---|",
        *_run_rows(runs),
        *(f"\nCould not be run: {name} ({why})." for name, why in ran.could_not().items()),
        "",
        "## Classes",
        "",
        "| class | releases: level (layer-id rule), evidence |",
        "|---|---|",
    ]
    for name in releases.class_names():
        steps = [s for s in matrix.steps(name, runs) if s.cell.level != support.ABSENT]
        lines.append(f"| `{name}` | {'<br>'.join(map(_step, steps))} |")
    return "\n".join(lines) + "\n"


def _rules() -> dict[str, str]:
    return {
        **{rule.id: rule.text for rule in releases.RULES.values()},
        releases.DEAD: "nothing is captured: the layers don't heed the setter that the class inherits",
        releases.UNKNOWN: "not found out",
    }


def _edges(cell: Cell) -> str:
    if cell.rule not in releases.RULES:
        return ""
    lost = [name for name, there in (("0", cell.first), ("L", cell.last)) if not there]
    return f"Stock cannot capture boundary {' or '.join(lost)}" if lost else ""


def _release_rows() -> list[str]:
    rows: list[str] = []
    last = None
    for name in releases.known_releases():
        facts = releases.release_facts(name)
        drafts = ", ".join(f"`{d}`" + (f" ({', '.join(read)})" if read else "") for d, read in facts.drafts.items())
        graphs = "the draft's" if facts.graph_ids == "configured" else "the default ones"
        now = f"{'entry point' if facts.entry_point else '`.pth`'} | {graphs} | {facts.missing_setter} | {drafts}"
        if now != last:
            rows.append(f"| {name} | {now} |")
        last = now
    return rows


def _run_rows(runs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    return [
        f"| {name} | `{c}` | {_run(r['stock'])} | {_run(r['plugin'])} | {r['date']} | `{r['command']}` |"
        for name, classes in runs.items()
        for c, r in classes.items()
    ]


def _run(run: dict[str, Any]) -> str:
    if not run["ok"]:
        return f"fails: {run['error']}".replace("|", "\\|")
    boundaries = "none" if run["boundaries"] is None else ", ".join(map(str, run["boundaries"]))
    tokens = "" if run["same_tokens"] else ", other tokens"
    return f"boundaries {boundaries}, acceptance {run['accept_length']}{tokens}"


def _step(step: Step) -> str:
    span = step.first if step.first == step.last else f"{step.first} to {step.last}"
    rule = f" ({step.cell.rule})" if step.cell.rule else ""
    return f"{span}: {step.cell.level}{rule}, {step.cell.evidence}"
