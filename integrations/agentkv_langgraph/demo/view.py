"""Showing the run while it goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentkv.units import format_seconds
from agentkv_langgraph.demo.board import Board, Line, residency_of, where_blocks_are

_REFRESH_S = 0.2


def watch(console: Console, board: Board, kv: Any, busy: Callable[[], bool], title: str) -> None:
    """Show the board until nobody is busy. KeyboardInterrupt passes, with the terminal left in order."""
    if console.is_terminal:
        _watch_live(console, board, kv, busy, title)
    else:
        _watch_plain(console, board, busy)


def _watch_live(console: Console, board: Board, kv: Any, busy: Callable[[], bool], title: str) -> None:
    started_s = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            going_on = busy()
            board.take_news()
            live.update(_table(board, kv, f"{title} · {format_seconds(time.monotonic() - started_s)}"), refresh=True)
            if not going_on:
                break
            time.sleep(_REFRESH_S)
    console.print(_table(board, kv, title))


def _watch_plain(console: Console, board: Board, busy: Callable[[], bool]) -> None:
    started_s = time.monotonic()
    while True:
        going_on = busy()
        for sentence in board.take_news():
            console.print(
                f"{time.monotonic() - started_s:6.1f} s  {sentence}", markup=False, highlight=False, soft_wrap=True
            )
        if not going_on:
            return
        time.sleep(_REFRESH_S)


def _table(board: Board, kv: Any, title: str) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("task", no_wrap=True)
    table.add_column("phase", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("tools", justify="right", no_wrap=True)
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("copies of its blocks", ratio=2, no_wrap=True)
    table.add_column("budget used", justify="right", no_wrap=True)
    for line in board.lines:
        table.add_row(
            line.title,
            line.doing(),
            f"{line.tools_done}/{line.tools_total}",
            f"{line.context_tokens:,}",
            where_blocks_are(residency_of(kv, line.key)),
            _budget(line),
        )
    return table


def _budget(line: Line) -> str:
    share = line.spent_tokens / line.budget_tokens if line.budget_tokens else 0.0
    return f"{line.spent_tokens:,} ({share:.0%})"
