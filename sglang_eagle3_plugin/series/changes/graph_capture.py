"""Graph capture: choose the captured layers once, from the draft's configuration, before any graph is captured."""

from __future__ import annotations

import ast

from sglang_eagle3_plugin.runtime.target import SETTER
from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.edit import Editor, UnfitError, calls, functions, statements
from sglang_eagle3_plugin.series.source import Source

RUNNER, GRAPHS = "sglang/srt/model_executor/model_runner.py", "sglang/srt/model_executor/cuda_graph_runner.py"


def _transform(source: Source) -> dict[str, str]:
    changed: dict[str, str] = {}
    for path in (GRAPHS, RUNNER):
        text = source.text(path)
        if text is None or f".{SETTER}()" not in text:
            continue
        editor = Editor(path, text)
        for block, statement in statements(editor.tree.body):
            if isinstance(statement, ast.If) and len(statement.body) == 1 and _sets_without_ids(statement.body[0]):
                _remove(editor, block, statement)
        if path == RUNNER:
            _set_before_graphs(editor)
        changed[path] = editor.result()
    if changed and set(changed) != {GRAPHS, RUNNER}:
        raise UnfitError(f"{SETTER}() is called without ids in {', '.join(changed)} alone")
    return changed


def _sets_without_ids(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and bool(calls(statement, SETTER))
        and not statement.value.args
    )


def _remove(editor: Editor, block: list[ast.stmt], statement: ast.If) -> None:
    if statement.orelse or len(block) == 1:
        raise UnfitError(f"{editor.path}:{statement.lineno}: the call without ids does not stand by itself")
    first, last = editor.lines_of(statement)
    if not editor.line(last + 1):  # and the blank line after it
        last += 1
    editor.replace_lines(first, last, "")


def _set_before_graphs(editor: Editor) -> None:
    """Move the statement that sets the configured ids to before the statement that builds attention backend and graphs."""
    runner = functions(editor.class_("ModelRunner")).get("initialize")
    if runner is None:
        raise UnfitError(f"{editor.path}: ModelRunner has no method initialize")
    setting = [s for s in runner.body if isinstance(s, ast.If) and any(call.args for call in calls(s, SETTER))]
    building = [s for s in runner.body if isinstance(s, ast.If) and calls(s, "init_device_graphs")]
    if len(setting) != 1 or len(building) != 1 or building[0].lineno > setting[0].lineno:
        raise UnfitError(f"{editor.path}: initialize does not build the graphs first and set the layers later, as it was known to")
    first, last = editor.lines_of(setting[0])
    moved = "".join(f"{editor.line(n)}\n" for n in range(first, last + 1))
    editor.replace_lines(first, last + (not editor.line(last + 1)), "")
    at = editor.first_line(building[0])
    editor.replace_lines(
        at, at - 1, f"{editor.indent(building[0])}# Before graph capture: a graph keeps what it was captured with.\n{moved}\n"
    )


CHANGE = Change(
    id="graph-capture-wiring",
    subject="[Spec] EAGLE-3: capture CUDA graphs with the configured layers",
    why="""The CUDA graph runner and the dummy run call set_eagle3_layers_to_capture() without ids, so the graphs keep the
default layers 2, L//2, L-3; the ids of the draft config are set afterwards and only eager passes use them. A draft trained on other
layers is fed two different wirings by one server. Set the configured layers once, before attention backend and graphs are built,
and drop the calls without ids.""",
    tested="""read against upstream's own change of the same idea; in every patched release the one call left stands before
attention backend and graphs are built. Not run with CUDA graphs.""",
    upstream="https://github.com/sgl-project/sglang/pull/22836 (in 0.5.11)",
    drop_when="the base is 0.5.11 or newer.",
    transform=_transform,
)
