"""One source file, reduced by syntax tree to what EAGLE-3 turns on. Pure; the result is small and can be pickled."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field

from sglang_eagle3_plugin.runtime.capture import MARK
from sglang_eagle3_plugin.runtime.target import SETTER
from sglang_eagle3_plugin.structure import Refusal, stream_of_forward

LIST = "layers_to_capture"
_NOT_CLASSES = {"add_prefix", "range", "len", "getattr", "maybe_prefix", "cast", "deepcopy", "replace", "set", "list", "dict"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Test:
    """One ``X in self.layers_to_capture`` of a class.

    Attributes:
        left: text of X.
        looped: it stands in a loop whose variable is part of X.
        needs_residual: what it captures is ``hidden_states + residual``, whether or not there is a residual yet.
    """

    left: str
    looped: bool
    needs_residual: bool


@dataclass
class ClassSummary:
    """A class as its own file defines it; inheritance is resolved elsewhere.

    Attributes:
        bases: names of its bases, as written.
        methods: names of its methods.
        setters: source of the methods whose execution tells the layer-id rule, annotations and decorators removed.
        attributes: ``self.X = Y(...)``: attribute -> the names Y it may be made from; ``()name`` is the method ``name`` of self.
        defaults: parameters of ``__init__`` whose default is a name: parameter -> name.
        returns: method -> names of what it may return an instance of; class attribute -> the class that is its value.
        layer: names of the classes of which its list of decoder layers may consist, where it is called ``layers``.
        lists: likewise for module lists of other names: attribute -> names.
        tests: how its loop captures by list.
        marks: its loop captures by a mark on the layer.
        stream: for a class that looks like a decoder layer: where the residual stream is, or ``refused: why``.
        defers: its ``forward`` calls that of its base.
        logits: its ``__init__`` makes a ``LogitsProcessor``.
        all_logits: that one keeps the logits of every position, as block diffusion needs them.
    """

    bases: list[str]
    methods: list[str]
    setters: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    returns: dict[str, list[str]] = field(default_factory=dict)
    layer: list[str] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)
    tests: list[Test] = field(default_factory=list)
    marks: bool = False
    stream: str = ""
    defers: bool = False
    logits: bool = False
    all_logits: bool = False


@dataclass
class ModuleSummary:
    """A file: its classes, what it imports (name -> (module, name)), and the classes it registers as models.

    ``choices`` are its names for one of several classes: ``X = {key: A, ...}`` or ``X = A if ... else B`` -> [A, B].
    """

    classes: dict[str, ClassSummary] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)
    choices: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


def summarize(text: str, package: str) -> ModuleSummary:
    """Reduce a file.

    Args:
        text: its source.
        package: dotted name of the package it lies in, for relative imports.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in SGLang's own strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ModuleSummary(problem=f"it does not parse ({' '.join(str(error).split())[:80]})")
    summary = ModuleSummary()
    lines = text.splitlines() if LIST in text or MARK in text else []
    # Only statements outside of functions, but inside of `if` and `try`; imports anywhere, since wrappers import late.
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            summary.classes[node.name] = _class(node, lines)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node.value)]
            # EntryClass = ..., EntryClass += ..., EntryClass.append(...)
            if any(isinstance(n, ast.Name) and n.id == "EntryClass" for target in targets for n in ast.walk(target)):
                names = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
                summary.entries += [name for name in names if name != "EntryClass"]
            elif isinstance(node.value, (ast.Dict, ast.IfExp)):
                chosen = list(dict.fromkeys(n.id for n in ast.walk(node.value) if isinstance(n, ast.Name) and n.id[:1].isupper()))
                summary.choices.update({t.id: chosen for t in targets if isinstance(t, ast.Name) and chosen})
    for node in _imports(tree):
        module = _absolute(node, package)
        for alias in node.names:
            summary.imports.setdefault(alias.asname or alias.name, (module, alias.name))
    return summary


def _imports(tree: ast.Module) -> list[ast.ImportFrom]:
    """Those of the file and those inside an ``__init__``, where wrappers import the model that they wrap."""
    statements = _statements(tree.body)
    functions = [f for c in statements if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, Function)]
    late = [n for function in functions if function.name == "__init__" for n in ast.walk(function)]
    return [n for n in (*statements, *late) if isinstance(n, ast.ImportFrom)]


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, (ast.If, ast.Try)):
            found += _statements(node.body)
            found += _statements(node.orelse)
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    found += _statements(handler.body)
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _class(node: ast.ClassDef, lines: list[str]) -> ClassSummary:
    bases = [n.id for base in node.bases for n in ast.walk(base) if isinstance(n, ast.Name)][:8]
    functions = [n for n in _statements(node.body) if isinstance(n, Function)]
    summary = ClassSummary(bases, [f.name for f in functions])
    for statement in node.body:
        if isinstance(statement, ast.Assign):  # an alias: `get_embed_and_head = Other.get_embed_and_head`
            names = [t.id for t in statement.targets if isinstance(t, ast.Name)]
            summary.methods += names
            if isinstance(statement.value, (ast.Name, ast.Attribute)):  # `body_cls = qwen3_5.Qwen3_5ForCausalLM`
                summary.returns.update({name: [ast.unparse(statement.value)] for name in names})
    for function in functions:
        if function.name == SETTER:
            summary.setters[function.name] = _bare(function)
        elif function.name == "__init__":
            _read_init(function, summary)
        else:
            own = "\n".join(lines[function.lineno - 1 : function.end_lineno])
            if (LIST in own or MARK in own) and not function.name.startswith("set_"):
                _read_capture(function, summary)
            if function.name == "forward":
                _read_forward(function, node, summary)
    made_by = {name[2:] for names in summary.attributes.values() for name in names if name.startswith("()")}
    for function in functions:
        # `_init_model` and its kin may be called by a base's `__init__` alone.
        if function.name in made_by or function.name.startswith(("_init_", "init_", "_get_", "get_model")):
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
            summary.returns[function.name] = [name for value in returned for name in _made(value)]
    return summary


def _bare(function: Function) -> str:
    plain = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(plain, Function)
    plain.decorator_list = []
    plain.returns = None
    arguments = plain.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return ast.unparse(plain)


def _read_init(function: Function, summary: ClassSummary) -> None:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    summary.defaults = {a.arg: d.id for a, d in pairs if isinstance(d, ast.Name)}
    known = _locals(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LogitsProcessor":
            summary.logits = True
            summary.all_logits |= any(k.arg == "return_full_logits" for k in node.keywords)
        # self.layers.append(DecoderLayer(...)), which fills a list that was made empty
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
            for name in _self_attributes(node.func.value):
                _add_list(summary, name, _made(node.args[0], known, deep=True))
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in _self_attributes(target):
                if name == "layers" or _is_list(node.value, known):
                    _add_list(summary, name, _made(node.value, known, deep=True))
                made = _made(node.value, known)
                if made:
                    attribute = summary.attributes.setdefault(name, [])
                    attribute += [m for m in made if m not in attribute]


def _add_list(summary: ClassSummary, name: str, made: list[str]) -> None:
    names = summary.layer if name == "layers" else summary.lists.setdefault(name, [])
    names += [m for m in made if m not in names]


Locals = dict[str, list[ast.expr]]


def _locals(function: Function) -> Locals:
    """What a function assigns to its local names, and appends to them; not to its parameters."""
    found: Locals = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append") and node.args:
            found.setdefault(ast.unparse(node.func).removesuffix(".append"), []).append(node.args[0])
    arguments = function.args
    for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        found.pop(parameter.arg, None)
    return found


def _is_list(value: ast.expr, known: Locals) -> bool:
    """Whether an expression makes a list of modules: ``nn.ModuleList(...)``, ``make_layers(...)``, or a local made so."""
    if isinstance(value, ast.Name):
        return any(_is_list(v, {}) for v in known.get(value.id, ()))
    return isinstance(value, ast.Call) and bool(re.search(r"ModuleList$|^make_\w*layers$", ast.unparse(value.func)))


def _self_attributes(target: ast.expr) -> list[str]:
    targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return [t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"]


def _made(value: ast.expr, known: Locals | None = None, deep: bool = False) -> list[str]:
    """Names of what an expression makes an instance of: the callee of the outermost call, or of every call inside.

    A callee that is a local name is a class chosen at run time: ``[]TABLE`` where it was looked up in a table of the file, else
    ``?``. ``known``: the locals; names in them are followed once.
    """
    known = known or {}
    if isinstance(value, ast.IfExp):
        return _made(value.body, known, deep) + _made(value.orelse, known, deep)
    if isinstance(value, ast.Name):
        return [name for one in known.get(value.id, ()) for name in _made(one, _without(known, value.id), deep)]
    if deep:
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    else:
        calls = [value] if isinstance(value, ast.Call) else []
    names = []
    for call in calls:
        func = call.func
        if isinstance(func, ast.Name) and func.id in known:
            names += [_chosen(one) for one in known[func.id]]
        elif isinstance(func, ast.Name) and func.id not in _NOT_CLASSES:
            names.append(func.id)
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
            names.append(f"(){func.attr}")
        elif isinstance(func, ast.Attribute) and func.attr == "from_config":  # AutoModel.from_config(config)
            names.append("?")
    if deep:  # a class handed to a helper by name, make_layers(n, DecoderLayer), or a list that was filled before
        arguments = [a for call in calls for a in call.args if isinstance(a, ast.Name)]
        names += [a.id for a in arguments if a.id[:1].isupper()]
        names += [name for a in arguments if a.id in known for name in _made(a, known, deep)]
    return names


def _without(known: Locals, name: str) -> Locals:
    return {key: values for key, values in known.items() if key != name}


def _chosen(value: ast.expr) -> str:
    """Of the value of a local that is called: ``[]TABLE`` for a look-up in a table, a class's own name, else ``?``."""
    if isinstance(value, ast.Name):
        return value.id
    table: ast.expr | None = None
    if isinstance(value, ast.Subscript):
        table = value.value
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        table = value.func.value
    return f"[]{table.id}" if isinstance(table, ast.Name) else "?"


def _read_capture(function: Function, summary: ClassSummary) -> None:
    if any(isinstance(n, ast.Constant) and n.value == MARK for n in ast.walk(function)):
        summary.marks = True
    summary.tests += _tests(function)


def _read_forward(function: Function, cls: ast.ClassDef, summary: ClassSummary) -> None:
    summary.defers = any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(function))
    names = {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    if "forward_batch" in names and any(name.endswith("hidden_states") for name in names):
        stream = stream_of_forward("", function, ast.unparse(cls))
        summary.stream = f"refused: {stream.reason}" if isinstance(stream, Refusal) else stream.value


def _tests(function: Function) -> list[Test]:
    found: list[Test] = []
    parents = {child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In)):
            continue
        if not (isinstance(node.comparators[0], ast.Attribute) and node.comparators[0].attr == LIST):
            continue
        used = {n.id for n in ast.walk(node.left) if isinstance(n, ast.Name)}
        loops = []
        statement: ast.AST = node
        conditional: ast.If | None = None
        while statement in parents:
            statement = parents[statement]
            if isinstance(statement, ast.For):
                loops.append({n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)})
            if isinstance(statement, ast.If) and conditional is None and node in set(ast.walk(statement.test)):
                conditional = statement
        looped = any(used & names for names in loops) or (bool(loops) and bool(used) and "self" not in used)
        found.append(Test(ast.unparse(node.left), looped, conditional is not None and _adds_blindly(conditional)))
    return found


def _adds_blindly(conditional: ast.If) -> bool:
    """Whether a branch adds ``residual`` without asking whether there is one."""
    text = "\n".join(ast.unparse(n) for n in conditional.body)
    return "hidden_states + residual" in text and "residual is" not in text
