"""From paths to a deployment: configs and headers are read here, and nowhere else in the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from sglang_eagle3_plugin import checkpoints
from sglang_eagle3_plugin.doctor.deployment import Model
from sglang_eagle3_plugin.doctor.flags import Flags
from sglang_eagle3_plugin.errors import UserError

_OF_TARGET = ("embed_tokens.weight", "embed_tokens.qweight", "lm_head.weight")


def target(path: str, environ: Mapping[str, str]) -> Model:
    """Read a target: its config, and all its headers, of which only the embeddings and the head are kept.

    Raises:
        UserError: it is missing, malformed, or of a format that is refused.
    """
    return _model(path, environ, None, keep=_OF_TARGET)


def draft(path: str, environ: Mapping[str, str], revision: str | None = None) -> Model:
    """Read a draft: its config and its headers.

    Raises:
        UserError: it is missing, malformed, or of a format that is refused.
    """
    return _model(path, environ, revision, keep=None)


def _model(path: str, environ: Mapping[str, str], revision: str | None, *, keep: tuple[str, ...] | None) -> Model:
    place = checkpoints.locate(path, environ=environ, revision=revision)
    config, file = checkpoints.config_of(place)
    weights = checkpoints.read_checkpoint(place, (lambda name: name.endswith(keep)) if keep else (lambda name: True))
    return Model(config, str(file), weights if weights.files or weights.problems else None, place)


def named_by(flags: Flags) -> tuple[str | None, str | None]:
    """Return the target and the draft that a launch line names."""
    return flags.text("--model-path"), flags.text("--speculative-draft-model-path")


def installed() -> tuple[str | None, Path | None]:
    """Return the release of the SGLang in this environment and its package directory, without importing it."""
    try:
        release = metadata.version("sglang")
        spec = util.find_spec("sglang")
    except (metadata.PackageNotFoundError, ImportError, ValueError):
        return None, None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return release, Path(places[0]) if places else None


def source_tree(given: Path) -> Path:
    """Return the ``sglang`` package directory at or below a path.

    Raises:
        UserError: there is none.
    """
    for place in (given, given / "sglang", given / "python" / "sglang"):
        if (place / "srt" / "models").is_dir():
            return place
    raise UserError(f"{given} holds no SGLang: there is no srt/models in it; give the directory of the sglang package")
