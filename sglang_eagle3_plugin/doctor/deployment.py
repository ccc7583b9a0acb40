"""What is judged: a target, a draft, launch flags and a release, each as far as it is known. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_plugin.checkpoints import Checkpoint, Tensor
from sglang_eagle3_plugin.doctor.findings import Evidence
from sglang_eagle3_plugin.doctor.flags import Flags
from sglang_eagle3_plugin.targets import MOST_LAYERS, language_config

if TYPE_CHECKING:
    from sglang_eagle3_plugin.doctor.wiring import Wiring

_LARGEST = 1 << 40


def whole(value: Any) -> int | None:
    """Return a config's value if it is a non-negative integer of a sane size."""
    return value if type(value) is int and 0 <= value < _LARGEST else None


def switch(value: Any) -> bool | None:
    """Return a config's value if it is true or false."""
    return value if isinstance(value, bool) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a config's value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass
class Model:
    """A config and, where there are any, the headers of its weights.

    Attributes:
        config: config.json as it stands.
        file: what to call the config in evidence.
        weights: the headers; None when no weights are at hand.
        path: where it lies, None when it was only described.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    file: str = "config.json"
    weights: Checkpoint | None = None
    path: Path | None = None

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return language_config(self.config)

    @property
    def architecture(self) -> str | None:
        """The first of ``architectures``."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None

    @property
    def num_layers(self) -> int | None:
        """``num_hidden_layers`` of the language model."""
        layers = whole(self.text.get("num_hidden_layers", self.config.get("num_hidden_layers")))
        return layers if layers is not None and layers <= MOST_LAYERS else None

    @property
    def hidden_size(self) -> int | None:
        """``hidden_size`` of the language model."""
        return whole(self.text.get("hidden_size", self.config.get("hidden_size")))

    @property
    def vocab_size(self) -> int | None:
        """``vocab_size`` of the language model."""
        return whole(self.text.get("vocab_size"))

    @property
    def max_positions(self) -> int | None:
        """``max_position_embeddings`` of the language model."""
        return whole(self.text.get("max_position_embeddings"))

    def tensor(self, *suffixes: str) -> tuple[str, Tensor] | None:
        """Find a tensor by the end of its name; None when it is absent or no weights are at hand."""
        return self.weights.find(*suffixes) if self.weights else None

    def lacks(self, *suffixes: str) -> bool:
        """Whether the weights are at hand and none of them has such a name."""
        return self.weights is not None and self.weights.count > 0 and self.weights.find(*suffixes) is None

    def says(self, name: str) -> Evidence:
        """Evidence: a field of the config, dots leading into nested objects."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return Evidence(self.file, name, _brief(value))

    def holds(self, found: tuple[str, Tensor]) -> Evidence:
        """Evidence: a tensor's shape and dtype."""
        name, tensor = found
        return Evidence(tensor.file.name if tensor.file else "weights", name, f"{tensor.dtype} {list(tensor.shape)}")

    def has_not(self, name: str) -> Evidence:
        """Evidence: a tensor that is absent."""
        return Evidence(str(self.path or "weights"), name, "absent")


def signs_of_eagle3(draft: Model, target_hidden: int | None = None) -> list[Evidence]:
    """Collect what shows that a draft is an EAGLE-3 draft, whatever its architecture is called."""
    signs: list[Evidence] = []
    if "eagle3" in (draft.architecture or "").lower():
        signs.append(draft.says("architectures"))
    if str(draft.config.get("speculators_model_type", "")).lower() == "eagle3":
        signs.append(draft.says("speculators_model_type"))
    if isinstance(draft.config.get("eagle_config"), dict):
        signs.append(draft.says("eagle_config"))
    if whole(draft.config.get("draft_vocab_size")):
        signs.append(draft.says("draft_vocab_size"))
    signs += [draft.holds(found) for name in ("d2t", "hidden_norm.weight") if (found := draft.tensor(name))]
    fc = draft.tensor("fc.weight")
    hidden = target_hidden or draft.hidden_size
    if fc and hidden and len(fc[1].shape) == 2 and fc[1].shape[1] >= 3 * hidden:
        signs.append(draft.holds(fc))
    return signs


@dataclass
class Deployment:
    """Everything the checks look at.

    Attributes:
        target: None when nothing is known of it.
        draft: None when nothing is known of it.
        flags: of ``launch_server``.
        release: of SGLang, as it calls itself; None when unknown.
        source: the ``sglang`` package directory to read classes from (a fork, an installed copy); None to go by the release.
        plugin: whether this plugin is active in the server that is judged.
        environ: the server's environment.
        observed: what was seen of a run: an error text, an acceptance length.
        engine: what serves, or dumped, with the draft's ids: ``sglang``, ``vllm`` or ``llama.cpp``.
        collect_tokens: tokens whose hidden states are to be dumped, None when that was not asked.
        states: a directory of dumped hidden states, None when there is none.
        trained: the boundaries that the draft is known to have been trained on, by the user's word.
    """

    target: Model | None = None
    draft: Model | None = None
    flags: Flags = field(default_factory=Flags)
    release: str | None = None
    source: Path | None = None
    plugin: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    observed: str = ""
    engine: str = "sglang"
    collect_tokens: int | None = None
    states: Path | None = None
    trained: tuple[int, ...] | None = None

    @cached_property
    def wiring(self) -> Wiring:
        """What the draft wants, and what it gets; worked out once."""
        from sglang_eagle3_plugin.doctor import wiring

        return wiring.of(self)

    @cached_property
    def eagle3(self) -> bool:
        """Whether EAGLE-3 is served, or meant: the algorithm says so, none is named, or the draft is an EAGLE-3 draft all the same.

        ``EAGLE`` and ``NEXTN`` alone don't say it: drafts of EAGLE-1 and 2 and a model's own MTP layers are served by them.
        """
        if self.flags.algorithm in (None, "EAGLE3"):
            return True
        return bool(self.signs_of_eagle3)

    @cached_property
    def signs_of_eagle3(self) -> list[Evidence]:
        """What shows that the draft is an EAGLE-3 draft, seen beside its target; empty without a draft."""
        return signs_of_eagle3(self.draft, self.target.hidden_size if self.target else None) if self.draft else []

    @property
    def collecting(self) -> bool:
        """Whether hidden states are to be collected from this server."""
        wanted = ("--enable-return-hidden-states", "--enable-return-aux-hidden-states")
        return self.collect_tokens is not None or any(map(self.flags.has, wanted)) or bool(self.environ.get("EAGLE3_DUMP_DIR"))

    def of_flag(self, name: str) -> Evidence:
        """Evidence: a launch flag."""
        return Evidence("flags", name, " ".join(self.flags.given[name]) if self.flags.has(name) else "not given")

    def of_release(self) -> Evidence:
        """Evidence: the release."""
        return Evidence("SGLang", "release", self.release or "unknown")


def _brief(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, (dict, list)) and len(value) > 64:
        return f"{type(value).__name__} of {len(value)}"
    try:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to show"
    return shown if len(shown) <= 120 else shown[:117] + "..."
