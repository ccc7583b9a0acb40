"""What a draft's config.json says about the layers it was trained on. Pure but for :func:`find`; stdlib only.

Where trainers put the ids, read in their code:

- SpecForge, ModelOpt and TorchSpec: ``eagle_config.eagle_aux_hidden_state_layer_ids`` (ModelOpt:
  modelopt/torch/export/plugins/hf_spec_configs.py; SpecForge: configs/\\*.json). Ids of layers whose output is wanted.
- speculators: ``eagle_aux_hidden_state_layer_ids`` or ``aux_hidden_state_layer_ids`` at top level, beside
  ``speculators_model_type`` (speculators/models/eagle3/config.py). Boundaries, as vLLM counts.
- AngelSlim: ``aux_hidden_states_layer_ids`` at top level (it trains on ``hidden_states[id + 1]``). Layer outputs.

SGLang reads the first of these alone and falls back to its default layers without a word for all others.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import boundaries, checkpoints
from sglang_eagle3_plugin.boundaries import Convention, Decision
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.settings import Settings

IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "eagle_aux_hidden_state_layer_convention"
"""Our field in ``eagle_config``: ``output`` or ``boundary``."""
MANIFEST = "eagle3_manifest.json"
"""Beside a draft: a JSON object whose ``boundaries`` lists those of the dump that it was trained on."""

_PLACES: tuple[tuple[str, str], ...] = (
    ("eagle_config", IDS),
    ("", IDS),
    ("eagle_config", "aux_hidden_state_layer_ids"),
    ("", "aux_hidden_state_layer_ids"),
    ("", "aux_hidden_states_layer_ids"),
)
"""(object, field) in the order in which they count."""
_ANGELSLIM = "aux_hidden_states_layer_ids"
_LARGEST_ID = 10_000


class DraftError(ValueError):
    """A draft config that cannot be read: a field of the wrong type. The message names the field and what it holds."""


@dataclass(frozen=True)
class Draft:
    """A draft, as far as its config tells which hidden states it takes.

    Attributes:
        ids: its layer ids as listed; None where it lists none.
        where: the field they stand in, dots leading into objects; empty where there is none.
        ids_seen_by_sglang: the ids that SGLang's own runner sees; None where it falls back to its default layers. ``()`` is not
            None: an empty nested list makes SGLang capture nothing.
        architecture: the first of ``architectures``, None where there is none.
        convention: what the draft itself states in our field.
        format_convention: the convention fixed by the file's format, with the evidence.
        provenance: the convention known from elsewhere, with the evidence.
        recorded: boundaries of the dump it was trained on, from a manifest beside it, with the evidence.
        uses_aux_hidden_states: False where it says ``use_aux_hidden_state: false``.
        num_aux_hidden_states: the number of slots it states, None where it states none.
        conflicts: one sentence for each other field that lists other ids.
    """

    ids: tuple[int, ...] | None = None
    where: str = ""
    ids_seen_by_sglang: tuple[int, ...] | None = None
    architecture: str | None = None
    convention: Convention | None = None
    format_convention: tuple[Convention, str] | None = None
    provenance: tuple[Convention, str] | None = None
    recorded: tuple[tuple[int, ...], str] | None = None
    uses_aux_hidden_states: bool = True
    num_aux_hidden_states: int | None = None
    conflicts: tuple[str, ...] = ()


def find(path: str | None, revision: str | None = None) -> Draft | None:
    """Read the draft that SGLang was pointed to: a directory, a Hugging Face cache folder, or the id of a cached repository.

    Returns:
        None where it is not on this machine (yet).

    Raises:
        DraftError: its config is there and cannot be read.
    """
    if not path:
        return None
    try:
        place = checkpoints.locate(path, revision=revision)
        config, file = checkpoints.config_of(place)
    except UserError:
        return None
    return read(config, file.parent, named=path)


def read(config: Mapping[str, Any], directory: Path | None = None, *, named: str = "") -> Draft:
    """Read a draft's config.

    Args:
        config: config.json as parsed.
        directory: where it lies: tells its repository by the Hugging Face cache's layout, and may hold a manifest.
        named: what the user called it, which may be its repository's id.

    Raises:
        DraftError: a field that matters has the wrong type.
    """
    lists = _lists(config)
    where, ids = next(iter(lists.items()), ("", None))
    seen = lists.get(f"eagle_config.{IDS}")
    nested = _object(config, "eagle_config")
    uses = nested.get("use_aux_hidden_state", True)
    if not isinstance(uses, bool):
        raise DraftError(f"eagle_config.use_aux_hidden_state is {_brief(uses)}, neither true nor false")
    return Draft(
        ids=ids,
        where=where,
        ids_seen_by_sglang=seen,
        architecture=_architecture(config),
        convention=_own_convention(config),
        format_convention=_format(config, where, lists),
        provenance=_known(_names(config, directory, named), ids),
        recorded=_manifest(directory),
        uses_aux_hidden_states=uses,
        num_aux_hidden_states=_count(config),
        conflicts=_conflicts(where, lists),
    )


def decide_for(draft: Draft, num_layers: int, settings: Settings) -> Decision:
    """Decide which boundaries a draft wants of a target of ``num_layers`` layers; :func:`boundaries.decide` tells how.

    Raises:
        BoundaryError: what was decided cannot be captured in a target of this depth, or no reading can.
    """
    provenance = draft.provenance
    recorded = draft.recorded
    slots = len(draft.ids) if draft.ids else draft.num_aux_hidden_states or 3
    if recorded is not None and len(recorded[0]) != slots:
        # The dump held more boundaries than the draft takes (all of them, say); it may still tell one reading from the other.
        fits = [c for c in Convention if draft.ids and set(c.to_boundaries(draft.ids)) <= set(recorded[0])]
        provenance = (fits[0], recorded[1]) if len(fits) == 1 else provenance
        recorded = None
    return boundaries.decide(
        draft.ids,
        num_layers,
        user_boundaries=settings.capture_boundaries,
        user_convention=settings.layer_convention,
        config_convention=draft.convention,
        recorded=recorded,
        provenance=provenance,
        format_convention=draft.format_convention,
        uses_aux_hidden_states=draft.uses_aux_hidden_states,
    )


def _lists(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = {}
    for parent, name in _PLACES:
        value = (_object(config, parent) if parent else config).get(name)
        if value is not None:
            field = f"{parent}.{name}" if parent else name
            found[field] = _ids(value, field)
    return found


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DraftError(f"{name} is {_brief(value)}, not an object")
    return value


def _ids(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise DraftError(f"{field} is {_brief(value)}, not a list of layer ids")
    for item in value:
        if type(item) is not int:
            raise DraftError(f"{field} holds {_brief(item)}, and layer ids are whole numbers")
        if abs(item) > _LARGEST_ID:
            raise DraftError(f"{field} holds a number beyond any model's layers")
    if len(value) > _LARGEST_ID:
        raise DraftError(f"{field} lists {len(value)} ids")
    return tuple(value)


def _count(config: Mapping[str, Any]) -> int | None:
    value = config.get("num_aux_hidden_states")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _LARGEST_ID:
        raise DraftError(f"num_aux_hidden_states is {_brief(value)}, not a number of states")
    return value


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _own_convention(config: Mapping[str, Any]) -> Convention | None:
    value = _object(config, "eagle_config").get(CONVENTION)
    if value is None:
        return None
    try:
        return Convention(value)
    except (ValueError, TypeError):
        raise DraftError(f"eagle_config.{CONVENTION} is {_brief(value)}, neither 'output' nor 'boundary'") from None


def _format(config: Mapping[str, Any], where: str, lists: Mapping[str, tuple[int, ...]]) -> tuple[Convention, str] | None:
    if not where:
        return None
    top = lists.get(IDS)
    if where.startswith("eagle_config") and top and top == Convention.OUTPUT.to_boundaries(lists[where]):
        return Convention.OUTPUT, f"the ids at top level, where vLLM reads boundaries, are those of {where} plus 1"
    if where == _ANGELSLIM:
        return Convention.OUTPUT, f"{_ANGELSLIM} is AngelSlim's field, which trains on the outputs of these layers"
    if "speculators_model_type" in config and not where.startswith("eagle_config"):
        return Convention.BOUNDARY, "a speculators-format config lists boundaries, as vLLM counts"
    return None


def _conflicts(where: str, lists: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    if not where:
        return ()
    same = (lists[where], Convention.OUTPUT.to_boundaries(lists[where]))
    return tuple(
        f"{field} lists {list(ids)} and {where} lists {list(lists[where])}" for field, ids in lists.items() if ids not in same
    )


def _names(config: Mapping[str, Any], directory: Path | None, named: str) -> list[str]:
    names = [config.get("_name_or_path"), config.get("model"), named]
    for part in directory.parts if directory else ():
        match = re.fullmatch(r"models--([^/]+?)--([^/]+)", part)
        if match:
            names.append("/".join(match.groups()))
    return [name for name in names if isinstance(name, str)]


def _known(names: Sequence[str], ids: tuple[int, ...] | None) -> tuple[Convention, str] | None:
    for name in names:
        entry = known_drafts().get(name)
        # Only for the ids that the evidence is about: a repository can be published anew with others.
        if entry is not None and ids is not None and entry["ids"] in (None, list(ids)):
            return Convention(entry["convention"]), f"{name} is a known draft: {entry['evidence']}"
    return None


@functools.cache
def known_drafts() -> dict[str, dict[str, Any]]:
    """Published drafts whose convention is known: repository id -> ``convention``, ``ids``, ``evidence``."""
    text = resources.files("sglang_eagle3_plugin").joinpath("data/known_drafts.json").read_text(encoding="utf-8")
    drafts: dict[str, dict[str, Any]] = json.loads(text)["drafts"]
    return drafts


def _manifest(directory: Path | None) -> tuple[tuple[int, ...], str] | None:
    """The boundaries in a dump's manifest beside the draft; a manifest that cannot be read says nothing."""
    if directory is None:
        return None
    for file in [directory / MANIFEST, *sorted(directory.glob("manifest-w*.jsonl"))]:
        try:
            with file.open(encoding="utf-8") as stream:
                # One object in a file of its own, or the header that is the first line of a dump's manifest.
                header = json.loads(stream.read(1 << 20) if file.name == MANIFEST else stream.readline(1 << 20))
            listed = header.get("boundaries")
            if isinstance(listed, list) and listed:
                return _ids(listed, "boundaries"), f"{file.name} beside the draft names the boundaries of the dump"
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
    return None


def _brief(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, float, bool, type(None))) else f"a {type(value).__name__}"
