"""A bill on a terminal has colours, in a file it is its own text, and no task name is read as markup."""

import io

from rich.console import Console

from agentkv.cli.paint import painted

BILL = """Bill of task [red]x[/red]
  cost                    $0.0123
  tokens                  1,234 in 3 model calls
"""


def _shown(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="truecolor" if terminal else None, width=80)
    console.print(painted(BILL))
    return out.getvalue()


def test_a_file_gets_the_plain_text():
    """Byte for byte."""
    assert BILL == _shown(terminal=False)


def test_a_terminal_gets_headings_labels_and_figures():
    """Each in its own style, and the markup of a name as it was written."""
    shown = _shown(terminal=True)
    assert "[red]x[/red]" in shown
    assert "\x1b[36mcost\x1b[0m" in shown
    assert "\x1b[1m$0.0123\x1b[0m" in shown
