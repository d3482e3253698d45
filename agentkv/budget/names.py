"""Names as they may be shown: they come from users and models, so they may hold anything."""

from __future__ import annotations


def clean(text: str) -> str:
    """Whatever would move a cursor, turn the direction of writing, or not show at all is a question mark."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, width: int) -> str:
    """`text`, clean, in at most `width` characters."""
    text = clean(text[: width + 1]) if len(text) > width else clean(text)
    return text if len(text) <= width else text[: width - 3] + "..."
