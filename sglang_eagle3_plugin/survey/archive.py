"""The Python files of one SGLang release, read from a wheel or an unpacked tree without trusting either."""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sglang_eagle3_plugin.errors import UserError

LARGEST_FILE = 16 << 20
"""Bytes; no source file of SGLang comes near."""
WANTED = ("sglang/srt/",)
"""What of the package is looked at."""


@dataclass
class Archive:
    """Files by their path inside the package (``sglang/srt/...``).

    Attributes:
        release: what the archive calls itself.
        sizes: path -> (CRC or None, size in bytes): tells equal files of two wheels apart from changed ones without reading them.
        problems: one line for each member that was left out, and why.
    """

    release: str
    sizes: dict[str, tuple[int | None, int]]
    _read: Callable[[str], bytes]
    problems: list[str] = field(default_factory=list)

    def text(self, path: str) -> str:
        """Decode one file: UTF-8, a byte-order mark allowed.

        Raises:
            ValueError: it is no UTF-8, too large, or its bytes don't fit its checksum. The message is one line.
        """
        if self.sizes[path][1] > LARGEST_FILE:
            raise ValueError(f"{path} is too large ({self.sizes[path][1]} bytes)")
        try:
            return self._read(path).decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())[:100]})") from None

    def has(self, path: str) -> bool:
        """Whether the release has such a file."""
        return path in self.sizes

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Every file below a prefix, in order."""
        return (path for path in sorted(self.sizes) if path.startswith(prefix))


@contextmanager
def of_wheel(wheel: Path) -> Iterator[Archive]:
    """Open a wheel.

    Raises:
        UserError: it is missing, truncated or no zip file.
    """
    match = re.match(r"[A-Za-z0-9_.]+?-([^-]+)-", wheel.name)
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes: dict[str, tuple[int | None, int]] = {}
            problems: list[str] = []
            for member in archive.infolist():
                name = member.filename
                if _leaves(name):
                    problems.append(f"member {name[:80]!r} leaves the archive; it is left out")
                elif name.endswith(".py") and name.startswith(WANTED):
                    sizes[name] = (member.CRC, member.file_size)
            yield Archive(match[1] if match else "unknown", sizes, archive.read, problems)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"the wheel {wheel} cannot be read ({error}); delete it, and it is fetched again") from error


@contextmanager
def of_tree(root: Path) -> Iterator[Archive]:
    """Open an unpacked tree: a checkout (``python/sglang`` below it), an environment's site-packages, or the package itself.

    Raises:
        UserError: there is no package ``sglang`` in it.
    """
    for package in (root, root / "sglang", root / "python" / "sglang"):
        if package.name == "sglang" and (package / "srt" / "models").is_dir():
            break
    else:
        raise UserError(f"{root} holds no sglang/srt/models; give a checkout, site-packages or the package's directory")
    sizes: dict[str, tuple[int | None, int]] = {}
    problems = []
    top = package.resolve()
    for file in sorted((package / "srt").rglob("*.py")):
        if not file.resolve().is_relative_to(top):
            problems.append(f"{file.name} is a link out of the tree; it is left out")
        elif file.is_file():
            sizes["sglang/" + file.relative_to(package).as_posix()] = (None, file.stat().st_size)
    yield Archive(_version_of(package), sizes, lambda path: (package.parent / path).read_bytes(), problems)


def open_any(path: Path) -> AbstractContextManager[Archive]:
    """Open a wheel or a tree."""
    if path.is_dir():
        return of_tree(path)
    if path.suffix == ".whl":
        return of_wheel(path)
    raise UserError(f"{path} is neither a directory nor a wheel; give an SGLang wheel, checkout or installed package")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        total = hashlib.sha256()
        while block := stream.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _leaves(name: str) -> bool:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return not parts or parts[0].startswith("/") or ".." in parts or ":" in parts[0] or "\0" in name


def _version_of(package: Path) -> str:
    for name in ("version.py", "_version.py"):
        file = package / name
        if file.is_file():
            text = file.read_text("utf-8-sig", "replace")
            found = re.search(r"^(?:__version__|version)(?:\s*=\s*version)?\s*=\s*['\"]([^'\"]+)", text, re.M)
            if found:
                return found[1]
    for info in sorted(package.parent.glob("sglang*.dist-info")):
        return info.name.split("-")[1].removesuffix(".dist-info")
    return "unknown"
