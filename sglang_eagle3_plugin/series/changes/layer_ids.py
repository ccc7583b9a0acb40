"""Layer ids: read them wherever the draft config has them, and know what they name. Also the guard for the algorithm's flag.

The logic goes into one new module of SGLang's, the same text in every release; the changes below add to it and call it.
"""

from __future__ import annotations

import ast

from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.edit import Editor, UnfitError, functions, statements
from sglang_eagle3_plugin.series.source import Source

HELPER = "sglang/srt/speculative/eagle3_config.py"
MODULE = "sglang.srt.speculative.eagle3_config"
IDS = "eagle_aux_hidden_state_layer_ids"
RUNNERS = (
    "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
)
WIDTHS = (
    "sglang/srt/models/llama_eagle3.py",
    "sglang/srt/speculative/eagle_info.py",
    "sglang/srt/speculative/eagle_utils.py",
)

_READ = '''"""What an EAGLE-3 draft's config says about the target layers it is fed."""

from typing import Any, List, Optional


def _get(hf_config: Any, name: str, default: Any = None) -> Any:
    """A field of the nested ``eagle_config``, else of the config's top level."""
    nested = getattr(hf_config, "eagle_config", None) or {}
    if not isinstance(nested, dict):
        nested = vars(nested)
    value = nested.get(name)
    return getattr(hf_config, name, default) if value is None else value


def uses_aux_hidden_state(hf_config: Any) -> bool:
    return bool(_get(hf_config, "use_aux_hidden_state", True))


def get_layer_ids(hf_config: Any) -> Optional[List[int]]:
    """The ids for ``set_eagle3_layers_to_capture``; None where the config lists none."""
    return _get(hf_config, "eagle_aux_hidden_state_layer_ids")
'''

_IDS_PLAIN = '''def get_layer_ids(hf_config: Any) -> Optional[List[int]]:
    """The ids for ``set_eagle3_layers_to_capture``; None where the config lists none."""
    return _get(hf_config, "eagle_aux_hidden_state_layer_ids")
'''

_IDS_CONVENTION = '''class OutputLayerIds(list):
    """Ids of layers whose output is wanted, by the draft config's own word.

    Layer ``i``'s output is what enters layer ``i + 1``; -1 stands for the embeddings.
    """


def get_layer_ids(hf_config: Any) -> Optional[List[int]]:
    """The ids for ``set_eagle3_layers_to_capture``; None where the config lists none.

    ``eagle_aux_hidden_state_layer_convention`` says what the ids name: ``output``,
    the layers whose output is wanted, or ``boundary``, the layers whose input is
    wanted (``num_hidden_layers``: the last layer's output). Without it the ids are
    passed on as they are, and each model reads them by its own rule.
    """
    layer_ids = _get(hf_config, "eagle_aux_hidden_state_layer_ids")
    convention = _get(hf_config, "eagle_aux_hidden_state_layer_convention")
    if layer_ids is None or convention is None:
        return layer_ids
    if convention == "output":
        return OutputLayerIds(layer_ids)
    if convention == "boundary":
        return OutputLayerIds(layer_id - 1 for layer_id in layer_ids)
    raise ValueError(
        "eagle_aux_hidden_state_layer_convention of the draft config must be "
        f"'output' or 'boundary', not {convention!r}."
    )
'''

_GUARD = '''

def check_algorithm(hf_config: Any, is_eagle3: bool) -> None:
    """Refuse an EAGLE-3 draft under ``--speculative-algorithm EAGLE``.

    Such a server starts and answers, but captures no layer, never calls the draft's
    ``fc`` and overwrites its ``lm_head``, so almost no token is accepted.
    """
    architectures = getattr(hf_config, "architectures", None) or []
    eagle3 = [name for name in architectures if "eagle3" in name.lower()]
    if eagle3 and not is_eagle3:
        raise ValueError(
            f"The draft model is an EAGLE-3 draft ({eagle3[0]}): "
            "use --speculative-algorithm EAGLE3."
        )
'''


def _top_level(source: Source) -> dict[str, str]:
    changed = {HELPER: _READ}
    for path in RUNNERS:
        text = source.text(path)
        if text is None or f'"{IDS}"' not in text:
            continue
        editor = Editor(path, text)
        _read_by_helper(editor)
        changed[path] = editor.result()
    if len(changed) != 2:
        raise UnfitError(f"the draft's layer ids are read in {len(changed) - 1} places of {source.release}, not in one")
    for path in WIDTHS:
        text = source.text(path)
        if text is not None and f'"{IDS}"' in text and (new := _width_by_helper(path, text)):
            changed[path] = new
    return changed


def _read_by_helper(editor: Editor) -> None:
    """Replace the `try` that reads the ids, and swallows every exception, by calls of the helper."""
    readers = []
    for block, statement in statements(editor.tree.body):
        if isinstance(statement, ast.Try) and any(_assigns(s) for s in statement.body):
            readers.append(statement)
            before = block[block.index(statement) - 1]
            if _assigns(before):  # a default that the helper knows
                editor.replace_lines(before.lineno, statement.lineno - 1, "")
    if len(readers) != 1 or "draft_model_config.hf_config" not in editor.source(readers[0]):
        raise UnfitError(f"{editor.path} does not read the ids from draft_model_config.hf_config in one try statement")
    (reader,) = readers
    indent, names, lines = editor.indent(reader), [], []
    for statement in reader.body:
        target = _assigns(statement)
        if target is None:
            continue
        name = "get_layer_ids" if target.endswith(IDS) else "uses_aux_hidden_state"
        names.append(name)
        lines.append(_assignment(indent, target, f"{name}(draft_model_config.hf_config)"))
    editor.replace_lines(reader.lineno, reader.end_lineno or reader.lineno, "".join(lines))
    editor.add_import(MODULE, *names)


def _assignment(indent: str, target: str, call: str) -> str:
    line = f"{indent}{target} = {call}\n"
    if len(line) <= 89:
        return line
    name, argument = call[:-1].split("(")
    if len(f"{indent}{target} = {name}(") <= 88:
        return f"{indent}{target} = {name}(\n{indent}    {argument}\n{indent})\n"
    return f"{indent}{target} = (\n{indent}    {call}\n{indent})\n"


def _assigns(statement: ast.stmt) -> str | None:
    """The target, as text, of an assignment of the ids or of the use-aux switch."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = ast.unparse(statement.targets[0])
        if target.split(".")[-1] in (IDS, "eagle_use_aux_hidden_state"):
            return target
    return None


def _width_by_helper(path: str, text: str) -> str | None:
    """Where the number of ids is counted from the nested config alone, count what the helper reads."""
    editor = Editor(path, text)
    for block, statement in statements(editor.tree.body):
        if not (isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "layer_ids"):
            continue
        if "eagle_config.get(" not in editor.source(statement) or f'"{IDS}"' not in editor.source(statement):
            continue
        config = "config" if path.endswith("llama_eagle3.py") else "hf_config"
        fallback = " or []" if '"' + IDS + '", []' in editor.source(statement) else ""
        editor.replace(statement, f"layer_ids = get_layer_ids({config}){fallback}")
        before = block[block.index(statement) - 1] if block.index(statement) else None
        if before is not None and ast.unparse(before) == f"eagle_config = getattr({config}, 'eagle_config', None) or {{}}":
            editor.replace_lines(before.lineno, before.end_lineno or before.lineno, "")
    if not editor.changed:
        return None
    editor.add_import(MODULE, "get_layer_ids")
    return editor.result()


def _convention(source: Source) -> dict[str, str]:
    helper = source.text(HELPER) or ""
    if _IDS_PLAIN not in helper:
        raise UnfitError(f"{HELPER} is not as the change before left it")
    changed = {HELPER: helper.replace(_IDS_PLAIN, _IDS_CONVENTION)}
    for path in source.models("def set_eagle3_layers_to_capture"):
        text = source.text(path) or ""
        if "layer_ids[0] == 1" not in text:
            continue
        editor = Editor(path, text)
        for owner in (node for node in editor.tree.body if isinstance(node, ast.ClassDef)):
            setter = functions(owner).get("set_eagle3_layers_to_capture")
            for _, statement in statements(setter.body if setter else []):
                if isinstance(statement, ast.If) and ast.unparse(statement.test) == "layer_ids and layer_ids[0] == 1":
                    test = "isinstance(layer_ids, OutputLayerIds) or (\n    layer_ids and layer_ids[0] == 1\n)"
                    editor.replace(statement.test, test.replace("\n", "\n" + editor.indent(statement)))
        if not editor.changed:
            raise UnfitError(f"{path} tells conventions apart in a way that is not known")
        editor.add_import(MODULE, "OutputLayerIds")
        changed[path] = editor.result()
    return changed


def _guard(source: Source) -> dict[str, str]:
    changed = {HELPER: (source.text(HELPER) or "") + _GUARD}
    for path in RUNNERS:
        text = source.text(path)
        if text is None or f"import {MODULE}" in text or f"from {MODULE} import" not in text:
            continue
        editor = Editor(path, text)
        _call_guard(editor)
        changed[path] = editor.result()
    if len(changed) != 2:
        raise UnfitError(f"the draft's config is read in {len(changed) - 1} places of {source.release}, not in one")
    return changed


def _call_guard(editor: Editor) -> None:
    imports = [s for s in editor.tree.body if isinstance(s, ast.ImportFrom) and s.module == MODULE]
    names = sorted({"check_algorithm", *(alias.name for alias in imports[0].names)})
    line = f"from {MODULE} import {', '.join(names)}\n"
    if len(line) > 89:
        line = f"from {MODULE} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"
    editor.replace_lines(imports[0].lineno, imports[0].end_lineno or imports[0].lineno, line)
    for _, statement in statements(editor.tree.body):
        if not isinstance(statement, ast.If):
            continue
        test = ast.unparse(statement.test)
        if test == "self.spec_algorithm.is_eagle3() and (not self.is_draft_worker)":
            loaded = [s for s in statement.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "draft_model_config"]
            if len(loaded) != 1:
                break
            # Under EAGLE too: the config is read for the check alone.
            indent = editor.indent(statement)
            first, last = editor.lines_of(loaded[0])
            reading = "".join(f"{editor.line(n)}\n" for n in range(first, last + 1))
            if not editor.line(last + 1):
                last += 1
            editor.replace_lines(first, last, "")
            block_text = (
                f"{indent}if self.spec_algorithm.is_eagle() and not self.is_draft_worker:\n{reading}"
                f"{indent}    check_algorithm(\n{indent}        draft_model_config.hf_config,\n"
                f"{indent}        is_eagle3=self.spec_algorithm.is_eagle3(),\n{indent}    )\n\n"
            )
            editor.replace_lines(statement.lineno, statement.lineno - 1, block_text)
            return
        if test.removeprefix("self.") == "spec_algorithm.is_eagle3()" and any(_assigns(s) for s in statement.body):
            algorithm = test.removesuffix(".is_eagle3()")
            if "draft_path = " in editor.text:  # without a path that config is the target's
                block_text = (
                    "if draft_path:\n    check_algorithm(\n"
                    f"        draft_model_config.hf_config, is_eagle3={algorithm}.is_eagle3()\n    )\n"
                )
            else:
                block_text = f"check_algorithm(\n    draft_model_config.hf_config,\n    is_eagle3={algorithm}.is_eagle3(),\n)\n"
            editor.insert_before(statement, block_text)
            return
    raise UnfitError(f"{editor.path} does not read the draft's config where it was known to")


TOP_LEVEL = Change(
    id="layer-ids-top-level",
    subject="[Spec] EAGLE-3: read the draft's layer ids from the config's top level too",
    why="""The runner reads eagle_aux_hidden_state_layer_ids from the nested eagle_config alone, inside a try statement that
swallows every exception, so a top-level list (as speculators and vLLM write it) is dropped without a word and the default layers
are captured. Parts of SGLang accept the top level already (the MLA draft's class, the width helper): read both, nested first, in
one helper that every reader uses.""",
    tested="""the helper run on both layouts, on neither, and with use_aux_hidden_state false; every reader compiled. A draft
with a top-level list on the engines of 0.5.9 and 0.5.23, without a GPU: what the list names reached it (acceptance length 4.00
of 4).""",
    upstream="none",
    drop_when="the runner reads a top-level list.",
    transform=_top_level,
)

CONVENTION = Change(
    id="layer-id-convention",
    subject="[Spec] EAGLE-3: let the draft config say what its layer ids name",
    why="""One list of ids means different layers by release and model: most setters add one to each id (the ids name layers
whose output is wanted, as SpecForge and others write them), those of the DeepSeek family add one only if the first id is 1. A list
like 2, 30, 58 therefore changed its meaning with 0.5.13, silently, and some lists can't be written at all. Read
eagle_aux_hidden_state_layer_convention ("output" or "boundary") from the draft config; a config without it is read as before.""",
    tested="""every setter of the release run on stand-in modules with both conventions: the layers captured are the ones the
convention names, and those of a config without the field are unchanged. A tiny Kimi-K2.5 on the engines of 0.5.9 and 0.5.23,
without a GPU: its draft says that 1, 4, 6 are boundaries, and is fed them (acceptance length 4.00 of 4).""",
    upstream="none; https://github.com/sgl-project/sglang/pull/25454 added the guess by the first id (in 0.5.13)",
    drop_when="upstream reads a convention from the draft config.",
    transform=_convention,
)

GUARD = Change(
    id="eagle3-flag-guard",
    subject="[Spec] Refuse --speculative-algorithm EAGLE with an EAGLE-3 draft",
    why="""The pair starts and answers without any message: no layer is captured, the draft's fc is never called, and its lm_head
is overwritten by the target's. Measured with a draft made for the target: acceptance length 1.09 where 2.00 is due. Refuse it when
the draft's config is read, and say which flag is meant.""",
    tested="""the check run on EAGLE-3 drafts under both flags and on drafts of other kinds; its call sites compiled. The engines
of 0.5.9 and 0.5.23 refuse the pair at start, naming the flag.""",
    upstream="none",
    drop_when="SGLang refuses or corrects the flag itself.",
    transform=_guard,
)
