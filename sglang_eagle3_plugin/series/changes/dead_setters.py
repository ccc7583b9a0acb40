"""Dead setters: an inherited setter that marks nothing which the inner model reads."""

from __future__ import annotations

import ast

from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.edit import Editor, UnfitError, functions
from sglang_eagle3_plugin.series.source import Source

INNER, WRAPPER = "sglang/srt/models/qwen3_5.py", "sglang/srt/models/qwen3_vl.py"
EAGLE3, DFLASH = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"


def _transform(source: Source) -> dict[str, str]:
    """Qwen3.5's wrappers inherit Qwen3-VL's setter, which sets a list; their inner model looks at marks on its layers."""
    text = source.text(INNER)
    if text is None or "_is_layer_to_capture" not in text:
        return {}
    inner = Editor(INNER, text)
    methods = functions(inner.class_("Qwen3_5ForCausalLM"))
    if EAGLE3 in methods:
        return {}
    if DFLASH not in methods:
        raise UnfitError(f"{INNER} marks layers, but its inner model has no {DFLASH}")
    marks = inner.source(methods[DFLASH]).replace(f"def {DFLASH}", f"def {EAGLE3}")
    inner.insert_after(methods[DFLASH], "\n" + _dedent(marks) + "\n")
    wrapper = Editor(WRAPPER, source.text(WRAPPER) or "")
    _hand_on(wrapper)
    return {INNER: inner.result(), WRAPPER: wrapper.result()}


def _dedent(method: str) -> str:
    first, *rest = method.split("\n")
    return "\n".join([first, *(line[4:] for line in rest)])


def _hand_on(editor: Editor) -> None:
    """Let the wrapper's setter call the inner model's, where that has one."""
    setter = functions(editor.class_("Qwen3VLForConditionalGeneration")).get(EAGLE3)
    assigned = [
        node
        for node in ast.walk(setter or ast.Module([], []))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.model.layers_to_capture"
    ]
    if setter is None or len(assigned) != 2 or not isinstance(setter.body[-1], ast.If):
        raise UnfitError(f"{WRAPPER}: {EAGLE3} does not set self.model.layers_to_capture in two branches")
    for node in assigned:
        editor.replace(node.targets[0], "layers_to_capture")
    editor.insert_after(
        setter.body[-1],
        f'\nif hasattr(self.model, "{EAGLE3}"):\n    self.model.{EAGLE3}(layers_to_capture)\n'
        "else:\n    self.model.layers_to_capture = layers_to_capture\n",
    )


CHANGE = Change(
    id="dead-setters",
    subject="[Spec] Qwen3.5: mark the layers that EAGLE-3 captures",
    why="""Qwen3.5's entry classes inherit Qwen3-VL's setter, which stores a list of layers; their inner model captures layers that
carry a mark, and nobody sets it. EAGLE-3 starts, and not one auxiliary state is captured. Give the inner model the setter that
marks (as it has for DFlash), and let the wrapper's setter call it.""",
    tested="read against upstream's own change of the same idea in 0.5.22; the setter run on stand-in modules marks the layers.",
    upstream="the same code is in 0.5.22",
    drop_when="the base is 0.5.22 or newer.",
    transform=_transform,
)
