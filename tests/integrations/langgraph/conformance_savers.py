"""Checkpointers for the matrix: synchronous ones for `invoke` and `stream`, asynchronous ones on the cell's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Savers = Callable[[asyncio.Runner], AbstractContextManager[Any]]


def nowhere(_runner: asyncio.Runner) -> Any:
    """No checkpointer."""
    return nullcontext(None)


def sqlite(drive: str) -> Savers:
    """A database in memory, for one run."""
    if drive.startswith("a"):
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        return lambda runner: _on(runner, AsyncSqliteSaver.from_conn_string(":memory:"))
    from langgraph.checkpoint.sqlite import SqliteSaver

    return lambda _runner: SqliteSaver.from_conn_string(":memory:")


def postgres(drive: str, url: str) -> Savers:
    """A server's database, without the threads of earlier runs."""
    if drive.startswith("a"):
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        @contextmanager
        def on_loop(runner: asyncio.Runner) -> Iterator[Any]:
            with _on(runner, AsyncPostgresSaver.from_conn_string(url)) as saver:
                runner.run(saver.setup())
                runner.run(saver.adelete_thread("cell"))
                yield saver

        return on_loop
    from langgraph.checkpoint.postgres import PostgresSaver

    @contextmanager
    def in_thread(_runner: asyncio.Runner) -> Iterator[Any]:
        with PostgresSaver.from_conn_string(url) as saver:
            saver.setup()
            saver.delete_thread("cell")
            yield saver

    return in_thread


@contextmanager
def _on(runner: asyncio.Runner, opened: Any) -> Iterator[Any]:
    saver = runner.run(opened.__aenter__())
    try:
        yield saver
    finally:
        runner.run(opened.__aexit__(None, None, None))
