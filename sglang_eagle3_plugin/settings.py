"""The environment, read once into one frozen value. The only module that reads ``EAGLE3_*``."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_eagle3_plugin.boundaries import Convention

_FALSE = {"0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}


_GIB = 1 << 30


@dataclass(frozen=True)
class DumpSettings:
    """How hidden states are dumped; whether, says ``Settings.dump_dir``."""

    boundaries: tuple[int, ...] | None = None
    """``EAGLE3_DUMP_BOUNDARIES``: comma-separated boundaries; None for the defaults, or for those of a draft that is served."""
    all_boundaries: bool = False
    """``EAGLE3_DUMP_BOUNDARIES=all``: 0 to L."""
    final: bool = True
    """``EAGLE3_DUMP_FINAL``: 0 leaves the final state after the norm out. Before the norm it is boundary L."""
    generated: bool = False
    """``EAGLE3_DUMP_GENERATED``: 1 dumps generated tokens too."""
    fp8: bool = False
    """``EAGLE3_DUMP_DTYPE``: fp8, or native for the model's own."""
    max_bytes: int | None = None
    """``EAGLE3_DUMP_MAX_GB``: quota of the directory, in GiB."""
    min_free_bytes: int = _GIB
    """``EAGLE3_DUMP_MIN_FREE_GB``: stop before the disk has less, in GiB."""
    queue_bytes: int = 2 * _GIB
    """``EAGLE3_DUMP_QUEUE_GB``: host memory for states on their way, in GiB."""
    wait: bool = False
    """``EAGLE3_DUMP_WHEN_FULL``: wait (slow the server down) or drop (lose samples, counted)."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for through the environment.

    A value that does not parse never stops a process: it is left at its default and named in ``problems``, which activation logs.
    """

    enabled: bool = True
    """``EAGLE3_PLUGIN``: 0 turns everything off."""
    strict: bool = False
    """``EAGLE3_STRICT``: 1 stops the process where auto mode would warn."""
    allowed_by_sglang: bool = True
    """``SGLANG_PLUGINS`` is unset, or lists our entry point's name."""
    disabled_patches: frozenset[str] = frozenset()
    """``EAGLE3_DISABLE_PATCHES``: comma-separated ids of patches to leave out."""
    layer_convention: Convention | None = None
    """``EAGLE3_LAYER_CONVENTION``: output or boundary."""
    capture_boundaries: tuple[int, ...] | None = None
    """``EAGLE3_CAPTURE_BOUNDARIES``: comma-separated boundaries."""
    allow_miswired: bool = False
    """``EAGLE3_ALLOW_MISWIRED``: 1 serves although the wiring is certain to be wrong."""
    debug: str | None = None
    """``EAGLE3_DEBUG``: 1, or a spec; None when off."""
    debug_file: str | None = None
    """``EAGLE3_DEBUG_FILE``: where JSON lines go."""
    dump_dir: str | None = None
    """``EAGLE3_DUMP_DIR``: where hidden states are dumped; None when off."""
    dump: DumpSettings = field(default=DumpSettings())
    """``EAGLE3_DUMP_*``."""
    problems: tuple[str, ...] = field(default=())
    """One sentence for each value that did not parse."""

    @property
    def active(self) -> bool:
        """Whether anything of ours may touch SGLang in this process."""
        return self.enabled and self.allowed_by_sglang

    @property
    def why_inactive(self) -> str:
        """The variable that turned us off, or an empty string."""
        if not self.enabled:
            return "EAGLE3_PLUGIN=0"
        return "" if self.allowed_by_sglang else f"SGLANG_PLUGINS does not list {ENTRY_POINT_NAME}"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment (``os.environ`` unless given). Never raises."""
        env = os.environ if environ is None else environ
        problems: list[str] = []
        allow_list = env.get("SGLANG_PLUGINS")
        return cls(
            enabled=_flag(env, "EAGLE3_PLUGIN", True, problems),
            strict=_flag(env, "EAGLE3_STRICT", False, problems),
            # SGLang reads an empty list as "no filter" too: `if SGLANG_PLUGINS:` in sglang/srt/plugins/__init__.py.
            allowed_by_sglang=not allow_list or ENTRY_POINT_NAME in {name.strip() for name in allow_list.split(",")},
            disabled_patches=frozenset(filter(None, (name.strip() for name in env.get("EAGLE3_DISABLE_PATCHES", "").split(",")))),
            layer_convention=_convention(env, problems),
            capture_boundaries=_boundaries(env, "EAGLE3_CAPTURE_BOUNDARIES", problems),
            allow_miswired=_flag(env, "EAGLE3_ALLOW_MISWIRED", False, problems),
            debug=None if env.get("EAGLE3_DEBUG", "").strip().lower() in _FALSE | {""} else env["EAGLE3_DEBUG"].strip(),
            debug_file=env.get("EAGLE3_DEBUG_FILE") or None,
            dump_dir=env.get("EAGLE3_DUMP_DIR") or None,
            dump=_dump(env, problems),
            problems=tuple(problems),
        )


ENTRY_POINT_NAME = "eagle3"
"""Our name among the ``sglang.srt.plugins`` entry points, which ``SGLANG_PLUGINS`` lists."""


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's processes leave records and control files.

    ``$EAGLE3_RUNTIME_DIR``, else below ``$XDG_RUNTIME_DIR``, else below the temporary directory.
    """
    env = os.environ if environ is None else environ
    if env.get("EAGLE3_RUNTIME_DIR"):
        return Path(env["EAGLE3_RUNTIME_DIR"])
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"], "sglang-eagle3")
    temporary = environ.get("TMPDIR") if environ else None  # another process's
    return Path(temporary or tempfile.gettempdir(), f"sglang-eagle3-{os.getuid()}")


def _flag(env: Mapping[str, str], name: str, default: bool, problems: list[str]) -> bool:
    value = env.get(name, "").strip().lower()
    if not value:
        return default
    if value in _TRUE | _FALSE:
        return value in _TRUE
    problems.append(f"{name}={env[name]!r} is neither 1 nor 0; it is taken as {int(default)}")
    return default


def _convention(env: Mapping[str, str], problems: list[str]) -> Convention | None:
    value = env.get("EAGLE3_LAYER_CONVENTION", "").strip().lower()
    if not value:
        return None
    try:
        return Convention(value)
    except ValueError:
        problems.append(f"EAGLE3_LAYER_CONVENTION={value!r} is neither 'output' nor 'boundary'; it is ignored")
        return None


def _dump(env: Mapping[str, str], problems: list[str]) -> DumpSettings:
    every = env.get("EAGLE3_DUMP_BOUNDARIES", "").strip().lower() == "all"
    quota = _gib(env, "EAGLE3_DUMP_MAX_GB", None, problems)
    return DumpSettings(
        boundaries=None if every else _boundaries(env, "EAGLE3_DUMP_BOUNDARIES", problems),
        all_boundaries=every,
        final=_flag(env, "EAGLE3_DUMP_FINAL", True, problems),
        generated=_flag(env, "EAGLE3_DUMP_GENERATED", False, problems),
        fp8=_choice(env, "EAGLE3_DUMP_DTYPE", ("native", "fp8"), problems) == "fp8",
        max_bytes=quota,
        min_free_bytes=_gib(env, "EAGLE3_DUMP_MIN_FREE_GB", _GIB, problems) or 0,
        queue_bytes=_gib(env, "EAGLE3_DUMP_QUEUE_GB", 2 * _GIB, problems) or 2 * _GIB,
        wait=_choice(env, "EAGLE3_DUMP_WHEN_FULL", ("drop", "wait"), problems) == "wait",
    )


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...], problems: list[str]) -> str:
    """One of ``choices``; the first unless set."""
    value = env.get(name, "").strip().lower()
    if value and value not in choices:
        problems.append(f"{name}={env[name]!r} is none of {', '.join(choices)}; it is taken as {choices[0]}")
    return value if value in choices else choices[0]


def _gib(env: Mapping[str, str], name: str, default: int | None, problems: list[str]) -> int | None:
    """A number of GiB, in bytes."""
    value = env.get(name, "").strip()
    if not value:
        return default
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        problems.append(f"{name}={value!r} is not a number of GiB like 100 or 0.5; it is ignored")
        return default
    return int(float(value) * _GIB)


def _boundaries(env: Mapping[str, str], name: str, problems: list[str]) -> tuple[int, ...] | None:
    value = env.get(name, "").strip()
    if not value:
        return None
    if not re.fullmatch(r"\d{1,6}(\s*,\s*\d{1,6})*", value):
        problems.append(f"{name}={value!r} is not a comma-separated list of boundaries like 2,30,58; it is ignored")
        return None
    return tuple(int(part) for part in value.split(","))
