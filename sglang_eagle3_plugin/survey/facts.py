"""The facts of one release, put together from its files: what ``releases`` serves from data, found anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_eagle3_plugin.releases import DEAD, RULES, UNKNOWN, Captured, ClassFacts, ReleaseFacts, captured_by
from sglang_eagle3_plugin.runtime.target import ACCESSOR, SETTER
from sglang_eagle3_plugin.survey.archive import Archive
from sglang_eagle3_plugin.survey.classes import Class, Classes
from sglang_eagle3_plugin.survey.execute import Outcome, run_setter
from sglang_eagle3_plugin.survey.modules import ModuleSummary, summarize

MODELS = "sglang/srt/models/"
NOT_TARGETS = re.compile(
    r"Eagle|NextN|MTP|DFlash|DSpark|Drafter|Draft|Assistant|Reward|Classification|Embedding|ForSequence|Pooler|Encoder(Model)?$"
    r"|Speculator|CLIP|Bert|BERT"
)
"""Registered classes that are drafts, or generate no tokens."""
BLOCK_DIFFUSION = "it is decoded by block diffusion, not token after token, so there is no next token for a draft to propose"
"""Of classes whose ``LogitsProcessor`` keeps the logits of every position: SDAR, LLaDA 2, DiffusionGemma."""
DRAFT_FIELDS = ("num_aux_hidden_states", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "target_hidden_size")
"""Config fields of drafts whose support differs between releases."""
PROBES: tuple[tuple[int, tuple[int, ...] | None], ...] = (
    (61, None), (36, None), (61, (2, 30, 58)), (61, (1, 29, 57)), (36, (24, 30, 36)), (61, (-1, 2, 30)), (36, (1, 17, 36)),
    (24, (5,)), (24, (1, 5, 11, 17)), (24, ()), (61, (58, 30, 2)),
)  # fmt: skip
"""(L, ids) with which a setter is tried; no two rules agree on all of them."""

Summaries = Mapping[str, ModuleSummary]


@dataclass
class Release:
    """One release, as its own files tell it.

    Attributes:
        name: what it calls itself.
        facts: of the whole release.
        classes: model class -> its facts; targets only.
        tree: its classes, to execute setters of.
        entries: target classes by name.
    """

    name: str
    facts: ReleaseFacts
    classes: dict[str, ClassFacts]
    tree: Classes
    entries: dict[str, Class]

    def run(self, class_name: str, calls: Sequence[Sequence[int] | None], num_layers: int) -> Outcome:
        """Execute a class's own setter; see :func:`run_setter`."""
        return run_setter(self.tree, self.entries[class_name], calls, num_layers)

    def captured(self, class_name: str, ids: Sequence[int] | None, num_layers: int) -> Captured | None:
        """What this release captures, by executing its setter: :func:`releases.captured` without any table.

        Returns:
            None where it has no such class, or the class no setter, or the setter fails on the stand-ins.
        """
        facts = self.classes.get(class_name)
        if facts is None or (facts.rule == UNKNOWN and self.run(class_name, [ids], num_layers).listed is None):
            return None

        def execute(given: Sequence[int] | None, layers: int) -> tuple[int, ...]:
            return self.run(class_name, [given], layers).listed or ()

        source = f"SGLang {self.name}: {facts.setter}.set_eagle3_layers_to_capture, executed"
        return captured_by(facts, self.facts, ids, num_layers, source, apply=execute)


def summaries_of(archive: Archive, summarize_file: Callable[[str, str], ModuleSummary] | None = None) -> dict[str, ModuleSummary]:
    """Summarize every model file of an archive.

    Args:
        archive: the release.
        summarize_file: (path, package) -> summary; reads and parses the file unless something else (a cache) is given.
    """
    found = {}
    for path in archive.paths(MODELS):
        package = path.rsplit("/", 1)[0].replace("/", ".")
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        found[name] = summarize_file(path, package) if summarize_file else read_module(archive, path, package)
    return found


def read_module(archive: Archive, path: str, package: str) -> ModuleSummary:
    """Summarize one file; one that cannot be read is an empty summary with its problem."""
    try:
        return summarize(archive.text(path), package)
    except ValueError as error:
        return ModuleSummary(problem=str(error).removeprefix(path).strip())


def of_archive(archive: Archive, summaries: Summaries | None = None) -> Release:
    """Find out everything about a release.

    Args:
        archive: its files.
        summaries: those of its model files, where they are known already.
    """
    modules = summaries_of(archive) if summaries is None else summaries
    tree = Classes(modules)
    entries = {c.name: c for c in tree.entries() if not NOT_TARGETS.search(c.name) and _generates(tree, c)}
    whole = _whole(archive, modules, tree)
    classes = {name: _class(tree, entries[name]) for name in sorted(entries)}
    return Release(archive.release, whole, classes, tree, entries)


def rule_of(run: Callable[[Sequence[int] | None, int], tuple[int, ...] | None]) -> str:
    """The rule that a setter follows in every probe, or ``UNKNOWN``.

    Args:
        run: (ids, L) -> what it asked for, ascending; None where it failed.
    """
    seen = {(layers, ids): run(ids, layers) for layers, ids in PROBES}
    if any(outcome is None for outcome in seen.values()) and seen[PROBES[0]] is not None:
        # A setter that takes no ids fails with them; SGLang of that time gave it none.
        given = [key for key, outcome in seen.items() if outcome is not None]
        if all(ids is None for _, ids in given):
            return "fixed"
    for rule in RULES.values():
        if all(outcome == tuple(sorted(rule.apply(ids, layers))) for (layers, ids), outcome in seen.items()):
            return rule.id
    return UNKNOWN


def _generates(tree: Classes, cls: Class) -> bool:
    """Whether a class makes tokens: by its name, or by a ``LogitsProcessor`` in it or in what it wraps."""
    if re.search(r"ForCausalLM|ForConditionalGeneration|LMHeadModel|^MiniCPM[VO]$", cls.name):
        return True
    return any(c.summary.logits for reached in tree.reach(cls) for c in tree.lineage(reached))


def _class(tree: Classes, cls: Class) -> ClassFacts:
    setter, accessor = tree.definer(cls, SETTER), tree.definer(cls, ACCESSOR)
    values: dict[str, str | bool | None] = {
        "module": cls.module.removeprefix("sglang.srt.models."),
        "setter": setter.name if setter else None,
        "accessor": accessor.name if accessor else None,
    }
    values["inner"] = next((a for a, inner in tree.inner(cls) if tree.definer(inner, SETTER) and tree.definer(inner, ACCESSOR)), "")
    values["chosen"], values["around"] = tree.chosen(cls), tree.wraps(cls)
    if any(c.summary.all_logits for c in tree.lineage(cls)):
        values["never"] = BLOCK_DIFFUSION
    stack = tree.stack_of(cls)
    if setter is not None:
        outcome = run_setter(tree, cls, [None], 61)
        stack = outcome.stack or stack
        values.update(_setter_facts(tree, cls, stack, outcome))
    if stack is not None:
        values["stack"] = stack.name
        values["stream"] = tree.stream_in(stack)
        if setter is None:
            values.update(_capture_facts(tree, stack))
    return ClassFacts(**values)  # type: ignore[arg-type]


def _capture_facts(tree: Classes, stack: Class) -> dict[str, str | bool | None]:
    capturer = tree.capture_of(stack)
    if capturer is None:
        return {}
    tests = capturer.summary.tests
    looped = [t for t in tests if t.looped]
    if looped or capturer.summary.marks:
        plain = [t for t in looped if re.fullmatch(r"\w+", t.left)]
        ahead = [t for t in looped if re.fullmatch(r"\w+ \+ 1", t.left)]
        ends = [t for t in tests if not t.looped and "start" not in t.left]
        starts = [t for t in tests if not t.looped and "start" in t.left]
        return {
            "capture": "list" if looped else "mark",
            "first": bool(starts) or (all(not t.needs_residual for t in plain) if looped and plain else not looped),
            "last": bool(ends or ahead),
        }
    return {}


def _setter_facts(tree: Classes, cls: Class, stack: Class | None, outcome: Outcome) -> dict[str, str | bool | None]:
    captures = _capture_facts(tree, stack) if stack else {}
    if outcome.listed is None:
        return {"rule": UNKNOWN, "why": outcome.error or "it assigned no layers"}
    if not captures:
        # The setter assigned a list that no code of the stack reads.
        return {"rule": DEAD if stack else UNKNOWN, "why": "" if stack else "its layer stack was not found"}
    marks = captures["capture"] == "mark"
    if marks and not outcome.marked:
        return {**captures, "rule": DEAD}

    def run(ids: Sequence[int] | None, layers: int) -> tuple[int, ...] | None:
        done = run_setter(tree, cls, [ids], layers)
        # A list of marks that runs past the last layer raises after the list was assigned; the list is what was asked for.
        return done.listed if not done.error or done.error.startswith("IndexError") else None

    below = run_setter(tree, cls, [(-3, 2)], 61)
    return {
        **captures,
        "rule": rule_of(run),
        "beyond": run_setter(tree, cls, [(70,)], 61).error.startswith("IndexError"),
        "wraps": marks and any(b > 50 for b in below.marked),
    }


def _whole(archive: Archive, modules: Summaries, tree: Classes) -> ReleaseFacts:
    problems = [*archive.problems, *(f"{name}: {m.problem}" for name, m in modules.items() if m.problem)]
    calls = [*_calls(archive, problems)]
    # `model.set_eagle3_layers_to_capture()` in the graph runner; with ids in the ModelRunner and its components.
    graph = [given for where, given in calls if "cuda_graph" in where]
    other = [given for where, given in calls if "cuda_graph" not in where]
    entry = any(archive.has(f"sglang/srt/plugins/{name}.py") for name in ("__init__", "loader"))
    return ReleaseFacts(
        entry_point=entry,
        graph_ids="none" if graph and not all(graph) else "configured",
        eager_ids="configured" if any(other) else "none",
        calls=tuple(sorted({where for where, _ in calls})),
        missing_setter=_missing_setter(archive, [where for where, _ in calls]),
        drafts=_drafts(archive, modules),
        problems=tuple(sorted(problems)),
    )


def _calls(archive: Archive, problems: list[str]) -> Iterator[tuple[str, bool]]:
    """(file:function, whether ids are given) of each call of the setter outside of the models."""
    for path in archive.paths("sglang/srt/model_executor/"):
        try:
            text = archive.text(path)
            if f".{SETTER}(" not in text:
                continue
            tree = ast.parse(text)
        except (ValueError, SyntaxError) as error:
            problems.append(f"{path}: {error}")
            continue
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == SETTER:
                    yield f"{path.removeprefix('sglang/srt/')}:{function.name}", bool(node.args or node.keywords)


def _missing_setter(archive: Archive, places: list[str]) -> str:
    for path in {"sglang/srt/" + place.split(":")[0] for place in places}:
        if f'hasattr(model, "{SETTER}")' in archive.text(path):
            return "ValueError"
    return "AttributeError"


def _drafts(archive: Archive, modules: Summaries) -> dict[str, tuple[str, ...]]:
    found = {}
    for module in sorted(modules):
        names = [name for name in modules[module].entries if re.search(r"Eagle3", name)]
        if names:
            path = module.replace(".", "/") + ".py"
            text = archive.text(path if archive.has(path) else path.removesuffix(".py") + "/__init__.py")
            found.update({name: tuple(f for f in DRAFT_FIELDS if re.search(rf"\b{f}\b", text)) for name in names})
    return dict(sorted(found.items()))
