"""Names, inheritance and inner models among the summaries of one release. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_eagle3_plugin.survey.modules import ClassSummary, ModuleSummary

INNER = ("language_model", "llm", "thinker", "text_model", "model")
"""Attributes in which a model keeps the model it wraps, the outer ones first."""


@dataclass(frozen=True)
class Class:
    """A class at home in a file."""

    module: str
    name: str
    summary: ClassSummary

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from another of the same name."""
        return (self.module, self.name)


class Classes:
    """All classes of a release's model files, by name and module.

    Args:
        modules: dotted module name -> its summary.
    """

    def __init__(self, modules: Mapping[str, ModuleSummary]) -> None:
        self._modules = modules

    def entries(self) -> Iterator[Class]:
        """Every class that a file registers as a model, in the order of modules."""
        seen = set()
        for module in sorted(self._modules):
            for name in self._modules[module].entries:
                found = self.find(module, name)
                if found is not None and name not in seen:
                    seen.add(name)
                    yield found

    def find(self, module: str, name: str, depth: int = 8) -> Class | None:
        """Resolve a name in a module, through imports; ``other.Name`` where ``other`` is an imported module."""
        summary = self._modules.get(module)
        if summary is None or not depth:
            return None
        if "." in name:
            owner, _, last = name.partition(".")
            package, original = summary.imports.get(owner, ("", ""))
            return self.find(f"{package}.{original}", last, depth - 1)
        if name in summary.classes:
            return Class(module, name, summary.classes[name])
        if name in summary.imports:
            source, original = summary.imports[name]
            return self.find(source, original, depth - 1)
        return None

    def lineage(self, cls: Class) -> list[Class]:
        """The class and its bases, depth first, each once: Python's order wherever bases don't share ancestors."""
        order: list[Class] = []
        seen: set[tuple[str, str]] = set()

        def visit(one: Class) -> None:
            if one.key in seen:
                return
            seen.add(one.key)
            order.append(one)
            for base in one.summary.bases:
                parent = self.find(one.module, base)
                if parent is not None:
                    visit(parent)

        visit(cls)
        return order

    def definer(self, cls: Class, method: str) -> Class | None:
        """The class whose method it is: its own, or the first of its bases that has it."""
        return next((c for c in self.lineage(cls) if method in c.summary.methods), None)

    def capture_of(self, stack: Class) -> Class | None:
        """The class whose code captures when a stack runs; None where the ``forward`` that runs captures nothing."""
        for cls in self.lineage(stack):
            if cls.summary.tests or cls.summary.marks:
                return cls
            if "forward" in cls.summary.methods and not cls.summary.defers:
                return None
        return None

    def setter_of(self, cls: Class, name: str) -> tuple[Class, str] | None:
        """The source of a method that is executed, with the class that defines it."""
        return next(((c, c.summary.setters[name]) for c in self.lineage(cls) if name in c.summary.setters), None)

    def made(self, cls: Class, attribute: str) -> list[Class]:
        """The classes of which ``self.<attribute>`` may be an instance."""
        lineage = self.lineage(cls)
        owner = next((c for c in lineage if attribute in c.summary.attributes), None)
        if owner is None:
            return []
        found: dict[tuple[str, str], Class] = {}
        for name in owner.summary.attributes[attribute]:
            for one in self._resolve(name, owner, lineage):
                found.setdefault(one.key, one)
        return list(found.values())

    def _resolve(self, name: str, owner: Class, lineage: list[Class]) -> list[Class]:
        if name.startswith("()"):
            # A method that makes the inner model: the most derived one counts.
            maker = next((c for c in lineage if name[2:] in c.summary.returns), None)
            names = maker.summary.returns[name[2:]] if maker else []
            return [f for n in names if maker and not n.startswith("()") and (f := self.find(maker.module, n))]
        # A parameter of __init__ with a class for a default: the most derived default counts.
        for cls in lineage:
            if name in cls.summary.defaults:
                found = self.find(cls.module, cls.summary.defaults[name])
                return [found] if found else []
        found = self.find(owner.module, name)
        if found is None:  # one of several of its file: a table of versions, or a name that stands for one of two
            choices = self._modules[owner.module].choices.get(name.removeprefix("[]"), ())
            return [f for one in choices if (f := self.find(owner.module, one))]
        return [found]

    def inner(self, cls: Class) -> list[tuple[str, Class]]:
        """(attribute, class) of the models that a class may wrap."""
        return [(attribute, made) for attribute in INNER for made in self.made(cls, attribute)]

    def chosen(self, cls: Class) -> str:
        """The attribute of an inner model whose class is chosen when it is loaded, by its config; empty where there is none."""
        for reached in self.reach_all(cls):
            for attribute in INNER:
                owner = next((c for c in self.lineage(reached) if attribute in c.summary.attributes), None)
                if owner is not None and "?" in owner.summary.attributes[attribute]:
                    return attribute
        return ""

    def wraps(self, cls: Class) -> str:
        """The attribute in which a class keeps the language model that it wraps; empty for a plain decoder.

        Also one kept a step further down, in what the class builds by its version (MiniCPM-V) or holds (Mistral 3 up to 0.5.9).
        """
        for reached in self.reach_all(cls, depth=2):
            lineage = self.lineage(reached)
            for attribute in INNER[:-1]:
                if any(attribute in c.summary.attributes for c in lineage):
                    return attribute
            if any(made.name.endswith("ForCausalLM") for made in self.made(reached, "model")):
                return "model"
        return ""

    def stack_of(self, cls: Class) -> Class | None:
        """The class that runs the decoder layers: the innermost model on the way that keeps ``layers``.

        Where the usual attributes lead to none, it is looked for as in a loaded model: anything on the way that keeps a list whose
        members take a ``forward_batch``.
        """
        usual = [c for c in reversed([*self.reach(cls)]) if any(p.summary.layer for p in self.lineage(c))]
        if usual and self.layers_of(usual[0]):
            return usual[0]
        found = [c for c in self.reach_all(cls) if self.layers_of(c)]
        refused = [c for c in found if self.stream_in(c).startswith("refused: ")]  # of encoder and decoder, the decoder
        return next(iter([*refused, *found, *usual]), None)

    def layers_of(self, stack: Class) -> list[Class]:
        """The classes of a stack's decoder layers: those that its list is made of, or those beside it that are called layers."""
        lineage = self.lineage(stack)
        for cls in lineage:
            for names in (cls.summary.layer, *cls.summary.lists.values()):
                found = {f.key: f for name in names for f in self._resolve(name, cls, lineage)}
                layers = [f for f in found.values() if self.stream_of(f)]
                if layers:  # parts that a layer is made of may take the same arguments
                    return [f for f in layers if "Layer" in f.name] or layers
        if not any(c.summary.layer for c in lineage):
            return []
        # Hybrid models choose among layer classes in a helper; all of a file carry the stream alike, or none of them counts.
        beside = [Class(stack.module, n, s) for n, s in self._modules[stack.module].classes.items() if "Layer" in n]
        streams = {self.stream_of(c): c for c in beside if self.stream_of(c)}
        return list(streams.values()) if len(streams) == 1 else []

    def stream_in(self, stack: Class) -> str:
        """Where the residual stream entering a stack's layers is; a layer that refuses speaks for all of them."""
        streams = [self.stream_of(layer) for layer in self.layers_of(stack)]
        return next((s for s in streams if s.startswith("refused: ")), streams[0] if streams else "")

    def stream_of(self, layer: Class) -> str:
        """Where the residual stream entering a decoder layer is; empty for a class that is none."""
        return next((c.summary.stream for c in self.lineage(layer) if c.summary.stream), "")

    def reach(self, cls: Class, depth: int = 4) -> Iterator[Class]:
        """The class, its inner models, theirs, and so on."""
        yield cls
        if depth:
            for _, inner in self.inner(cls):
                yield from self.reach(inner, depth - 1)

    def reach_all(self, cls: Class, depth: int = 5) -> Iterator[Class]:
        """The class and everything that it, or what it makes, keeps in an attribute; each once."""
        seen: set[tuple[str, str]] = set()

        def visit(one: Class, left: int) -> Iterator[Class]:
            if one.key in seen or not left:
                return
            seen.add(one.key)
            yield one
            for attribute in dict.fromkeys(a for c in self.lineage(one) for a in c.summary.attributes):
                for made in self.made(one, attribute):
                    yield from visit(made, left - 1)

        yield from visit(cls, depth)
