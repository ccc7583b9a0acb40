"""Text that others wrote, such as a config downloaded from the internet, on its way to a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """Write control characters as escapes, so that no file moves the cursor, hides a line or recolours one; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def escape(text: str) -> str:
    """Make text safe in rich's markup: :func:`visible`, and its brackets are brackets."""
    from rich.markup import escape as without_markup  # not above: a complaint needs no rich

    return without_markup(visible(text))
