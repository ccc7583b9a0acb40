"""Which releases a user means: ``>=0.5.9``, ``0.5.9,0.5.13``, ``all``."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from sglang_eagle3_plugin.errors import UserError


def select(spec: str | None, names: Iterable[str]) -> list[str]:
    """Return the releases that a specification names, oldest first.

    Args:
        spec: version specifiers (``>=0.5.9,<0.5.13``: all must hold), or a list of releases, which need not be known; ``all``; None
            is ``all``.
        names: the known releases.

    Raises:
        UserError: it is neither, or fits no release.
    """
    known = list(names)
    if spec is None or spec.strip() in ("", "all"):
        return known
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    try:
        if all(part[0].isdigit() or part[0] == "v" for part in parts):
            listed = {str(Version(part)): None for part in parts}
            return sorted(listed, key=Version)
        wanted = SpecifierSet(",".join(parts))
        found = [name for name in known if wanted.contains(Version(name), prereleases=True)]
    except (InvalidSpecifier, InvalidVersion, IndexError):
        raise UserError(
            f"--releases {spec!r} is neither a version specifier such as '>=0.5.9' nor a list such as 0.5.9,0.5.13"
        ) from None
    if not found:
        raise UserError(f"--releases {spec!r} fits no known release ({known[0]} to {known[-1]}); name one with 0.5.9,0.5.13")
    return found
