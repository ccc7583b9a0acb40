"""Boundary 0 (the embeddings) and boundary L (the last layer's output): capture them where a family can't yet.

Three generations of code: layers that return ``hidden_states, residual`` and a loop that adds the two; layers that carry a mark;
and, from 0.5.22, a residual stream whose final norm takes a callback.
"""

from __future__ import annotations

import ast

from sglang_eagle3_plugin.runtime.capture import MARK
from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.edit import Editor, calls, functions, statements, walk
from sglang_eagle3_plugin.series.source import Source

WANTED = "layers_to_capture"


def _transform(source: Source) -> dict[str, str]:
    changed = {}
    for path in source.models(WANTED):
        editor = Editor(path, source.text(path) or "")
        for owner in (node for node in editor.tree.body if isinstance(node, ast.ClassDef)):
            for name, method in functions(owner).items():
                if name == "forward":
                    _capture_ends(editor, method)
                elif name.startswith("set_"):
                    _mark_exactly(editor, method)
        if editor.changed:
            changed[path] = editor.result()
    return changed


def _capture_ends(editor: Editor, forward: ast.FunctionDef) -> None:
    if f"in self.{WANTED}" not in editor.source(forward) and MARK not in editor.source(forward):
        return
    plain = [append for append in _appends(forward) if _is_sum(append.args[0])]
    for append in plain:
        first = editor.line(append.lineno)
        editor.replace(append, _append(len(first) - len(first.lstrip())))
    loop = _loop(editor, forward)
    if loop is None or _captures_last(editor, forward, _end(loop)):
        return
    if calls(forward, "final_norm"):
        _final_norm(editor, forward, _end(loop))
    elif (
        plain or MARK in editor.source(loop) or "captured_last_layer_outputs" in editor.source(loop)
    ) and "Handoff" not in editor.source(forward):
        _after_loop(editor, forward, loop, _end(loop))


def _loop(editor: Editor, forward: ast.FunctionDef) -> ast.For | None:
    """The loop over the layers that captures."""
    found = [
        node
        for node in walk(forward)
        if isinstance(node, ast.For)
        and ast.unparse(node.iter).startswith("range(")
        and (f"in self.{WANTED}" in editor.source(node) or MARK in editor.source(node))
    ]
    return found[0] if len(found) == 1 else None


def _end(loop: ast.For) -> str:
    """The number of layers, as the loop writes it."""
    stop = ast.unparse(loop.iter.args[-1]) if isinstance(loop.iter, ast.Call) else ""
    return "self.end_layer" if stop == "normal_end_layer" else stop


def _captures_last(editor: Editor, forward: ast.FunctionDef, last: str) -> bool:
    text = editor.source(forward)
    return any(f"{end} in self.{WANTED}" in text for end in (last, "self.end_layer", "num_layers", "self.config.num_hidden_layers"))


def _appends(forward: ast.FunctionDef) -> list[ast.Call]:
    return [
        call for call in calls(forward, "append") if ast.unparse(call.func) == "aux_hidden_states.append" and len(call.args) == 1
    ]


def _is_sum(node: ast.expr) -> bool:
    return ast.unparse(node) in (
        "hidden_states + residual",
        "hidden_states + residual if residual is not None else hidden_states",
        "hidden_states if residual is None else hidden_states + residual",
    )


def _append(indent: int) -> str:
    """Before the first layer there is no residual yet, and the next norm adds into the tensor in place: keep a copy."""
    pad = " " * (indent + 4)
    value = "hidden_states.clone() if residual is None else hidden_states + residual"
    if len(pad + value) > 88:
        value = f"hidden_states.clone()\n{pad}if residual is None\n{pad}else hidden_states + residual"
    return f"aux_hidden_states.append(\n{pad}{value}\n{' ' * indent})"


def _after_loop(editor: Editor, forward: ast.FunctionDef, loop: ast.For, last: str) -> None:
    """Capture the last layer's output before the final norm, on the last pipeline rank."""
    after = [s for s in forward.body if s.lineno > (loop.end_lineno or loop.lineno)]
    leaving = next((s for s in after if isinstance(s, ast.If) and ast.unparse(s.test) == "not self.pp_group.is_last_rank"), None)
    if leaving is not None:
        place = leaving.orelse[0] if leaving.orelse else after[after.index(leaving) + 1]
    else:
        normed = [s for s in after if calls(s, "norm")]
        if not normed:
            return
        place = normed[0]
    editor.insert_before(
        place,
        f"if {last} in self.{WANTED}:\n    {_append(4 + place.col_offset).replace(chr(10) + ' ' * place.col_offset, chr(10))}\n",
    )


def _final_norm(editor: Editor, forward: ast.FunctionDef, last: str) -> None:
    norms = [call for call in calls(forward, "final_norm") if ast.unparse(call.func) == "residual_batch.final_norm"]
    lists = [
        s for _, s in statements(forward.body) if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "aux_hidden_states"
    ]
    if (
        len(norms) != 1
        or not any("AuxHiddenState" in ast.unparse(s.value) for s in lists)
        or any(k.arg == "capture" for k in norms[0].keywords)
    ):
        return
    (norm,) = norms
    holder = next(s for _, s in statements(forward.body) if isinstance(s, ast.Assign) and s.value is norm)
    pad = editor.indent(holder) + "    "
    arguments = [editor.source(a) for a in norm.args]
    arguments.append(f"capture=aux_hidden_states.capture\n{pad}if {last} in self.{WANTED}\n{pad}else None")
    arguments += [f"{k.arg}={editor.source(k.value)}" for k in norm.keywords]
    editor.replace(norm, "residual_batch.final_norm(\n" + "".join(f"{pad}{a},\n" for a in arguments) + f"{editor.indent(holder)})")
    # A rank without tokens skips the norm, and must hand on as many states as the others.
    for _, statement in statements(forward.body):
        if (
            isinstance(statement, ast.If)
            and holder in statement.body
            and not statement.orelse
            and "else" not in ast.unparse(statement.test)
        ):
            editor.insert_after(
                statement,
                f"elif {last} in self.{WANTED}:\n    aux_hidden_states.append(\n"
                "        residual_batch.snapshot(hidden_states, forward_batch)\n    )\n",
            )


def _mark_exactly(editor: Editor, setter: ast.FunctionDef) -> None:
    """Marks follow the list: set on the layers in it, cleared on the others, and none for the boundary behind the last layer."""
    for _, statement in statements(setter.body):
        if not (isinstance(statement, ast.For) and f"'{MARK}', True" in ast.unparse(statement)):
            continue
        model = ast.unparse(statement.iter).removesuffix(f".{WANTED}")
        indent = editor.indent(statement)
        editor.replace(
            statement,
            f"for layer_id, layer in enumerate({model}.layers):\n{indent}    layer.{MARK} = layer_id in {model}.{WANTED}",
        )


CHANGE = Change(
    id="capture-ends",
    subject="[Spec] EAGLE-3: capture the embeddings and the last layer's output",
    why="""A draft may be fed boundary 0 (the embeddings) or L (the last layer's output before the final norm). Most families
fail on 0, where there is no residual to add yet; those that take hidden_states as it is keep a tensor into which the next
fused add-and-norm writes. Most drop L silently, because no layer has that number, or raise IndexError where layers carry
marks; and marks are never cleared, so a second call captures the union. Copy at 0, capture at L before the final norm, and
let the marks follow the list.""",
    tested="""compiled in every release; the setters and marks run on stand-in modules. Boundaries 0, 4 and 8 of tiny 8-layer
Llama, Kimi-K2.5 and Qwen3-MoE targets on the engines of 0.5.9 and 0.5.23, without a GPU: each reached a draft that is right only
when fed them (acceptance length 4.00 of 4). The other families were not run.""",
    upstream="none for these families; gpt_oss, gemma3 and gemma4 capture L already (https://github.com/sgl-project/sglang/pull/32334)",
    drop_when="the family captures 0 and L.",
    transform=_transform,
)
