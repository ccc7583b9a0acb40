"""This plugin in an environment of the rig: really installed, so that its ``.pth`` and entry point are the real ones."""

from __future__ import annotations

import hashlib
import importlib.metadata
import tempfile
import zipfile
from pathlib import Path

import sglang_eagle3_plugin
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.rig.environments import Environment, locked, uv

DISTRIBUTION = "sglang-eagle3-plugin"
PACKAGE = Path(sglang_eagle3_plugin.__file__).parent
STAMP = ".eagle3-plugin"
"""In an environment: the digest of the plugin's files that were installed there last."""


def install_plugin(environment: Environment) -> None:
    """Install this very plugin into an environment, unless it is there already.

    From a source checkout the wheel is built; from an installed plugin its files are packed into one again.

    Raises:
        UserError: the wheel cannot be made or installed.
    """
    with locked(environment.root / f"{STAMP}.lock"):
        stamp = environment.root / STAMP
        digest = _digest()
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest and _is_installed(environment):
            return
        stamp.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _build_wheel(Path(scratch)) if _is_checkout() else _pack_wheel(Path(scratch))
            arguments = ("--python", str(environment.python), "--reinstall-package", DISTRIBUTION, "--compile-bytecode", str(wheel))
            uv("pip", "install", *arguments)
        stamp.write_text(digest, encoding="utf-8")


def uninstall_plugin(environment: Environment) -> None:
    """Take the plugin out of an environment; its dependencies stay.

    Raises:
        UserError: uv failed.
    """
    with locked(environment.root / f"{STAMP}.lock"):
        (environment.root / STAMP).unlink(missing_ok=True)
        if _is_installed(environment):
            uv("pip", "uninstall", "--python", str(environment.python), DISTRIBUTION)


def _is_installed(environment: Environment) -> bool:
    return any(environment.root.glob("lib/python*/site-packages/sglang_eagle3_plugin-*.dist-info"))


def _is_checkout() -> bool:
    return (PACKAGE.parent / "pyproject.toml").is_file() and (PACKAGE.parent / "sglang_eagle3_plugin.pth").is_file()


def _digest() -> str:
    digest = hashlib.sha256()
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    if _is_checkout():
        files += [PACKAGE.parent / "pyproject.toml", PACKAGE.parent / "sglang_eagle3_plugin.pth"]
    for path in sorted(files):
        digest.update(f"{path.relative_to(PACKAGE.parent)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _build_wheel(scratch: Path) -> Path:
    uv("build", "--wheel", "--out-dir", str(scratch), str(PACKAGE.parent))
    return next(scratch.glob("*.whl"))


def _pack_wheel(scratch: Path) -> Path:
    """Pack the files of the installed distribution into a wheel again. Its metadata, entry points included, are files of it."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"{PACKAGE} is neither a source checkout nor an installed {DISTRIBUTION}; install it with pip, then run this again"
        ) from None
    name = f"sglang_eagle3_plugin-{distribution.version}"
    left_out = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    wheel = scratch / f"{name}-py3-none-any.whl"
    members: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in distribution.files or ():
            # Scripts (above site-packages) and byte code are made again where the wheel is installed.
            if file.parts[0] == ".." or "__pycache__" in file.parts or (".dist-info" in file.parts[0] and file.name in left_out):
                continue
            archive.write(file.locate(), str(file))
            members.append(str(file))
        record = f"{name}.dist-info/RECORD"
        archive.writestr(record, "".join(f"{member},,\n" for member in [*members, record]))
    return wheel
