"""A bill on a terminal, by rich: headings, labels and figures told apart. Piped into a file it is the plain text.

The text is never read as markup: a task may be called `[red]`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_ROW = re.compile(r"  (\S.*?)(?:  +|$)")
_FIGURE = re.compile(r"(?<![\w.])[$]?\d[\d,.]*(?: ?(?:%|ms|s|min|h|[KMGT]i?B))?(?![\w])")


def show(text: str) -> None:
    """Print a bill to the standard output."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(painted(text))


def painted(text: str) -> Text:
    """The same characters, with styles: lines that begin at the margin are headings, others begin with a label."""
    from rich.text import Text

    lines = []
    for line in text.splitlines():
        made = Text(line)
        row = _ROW.match(line)
        if line and not line.startswith(" "):
            made.stylize("bold")
        else:
            made.highlight_regex(_FIGURE, "bold")
            if row is not None and row.end() < len(line):
                made.stylize("cyan", row.start(1), row.end(1))
        lines.append(made)
    return Text("\n").join(lines)
