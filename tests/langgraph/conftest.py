"""An AgentKV on a scripted engine under LangGraph's host, and a scripted engine whose contexts have blocks."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agentkv_langgraph import LangGraphHost

from agentkv import AgentKV, ScriptedEngine
from agentkv.context.tokens import count_text
from agentkv.core.hint import Hint
from agentkv.core.residency import Action, Move, Outcome, Receipt, Residency, Tier
from agentkv.engine.base import Generation, Request
from agentkv.engine.stream import Stream

sys.path.insert(0, str(Path(__file__).parent))
from hint_server import serving

BLOCK_BYTES = 4096


class BlockEngine(ScriptedEngine):
    """A scripted engine with imagined blocks: moves are believed, and token ids can be forced (their text is made up)."""

    def __init__(self, answers, **options) -> None:
        super().__init__(answers, **options)
        self.moves: list[Move] = []
        self._where: dict[str, Residency] = {}
        self._guard = threading.Lock()

    def submit(self, request: Request) -> Stream:
        forced = request.forced_ids
        stream = super().submit(replace(request, forced_ids=None))
        if forced is not None:
            self.forced = [*getattr(self, "forced", []), forced]
        stream.on_end(self._grown)
        return stream

    def _grown(self, generation: Generation | None, _error: BaseException | None) -> None:
        if generation is None:
            return
        tokens = generation.usage.total_tokens
        blocks = max(1, tokens // 16)
        with self._guard:
            self._where[generation.session] = Residency(
                session=generation.session, tokens=tokens, block_bytes=BLOCK_BYTES, total_blocks=blocks,
                device_blocks=blocks, unwritten_blocks=blocks, has_host=True, has_disk=True,
            )  # fmt: skip

    def residency(self, session: str) -> Residency | None:
        with self._guard:
            return self._where.get(session)

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        with self._guard:
            self.moves.append(move)
            where = self._where.get(move.session)
            if where is None:
                return False
            blocks = where.total_blocks
            if move.action is Action.PREFETCH:
                where = replace(where, device_blocks=blocks)
            elif move.action is Action.DEMOTE:
                name = "host_blocks" if move.to is Tier.HOST else "disk_blocks"
                where = replace(where, device_blocks=0, unwritten_blocks=0, **{name: blocks})
            self._where[move.session] = where
        if on_receipt is not None:
            receipt = Receipt(move=move, outcome=Outcome.DONE, blocks=blocks, size_bytes=blocks * BLOCK_BYTES)
            on_receipt(receipt)
        return True


@pytest.fixture(scope="session", autouse=True)
def _tokens_are_counted() -> None:
    """The tokeniser's table is there: no count depends on how far it is (`test_first_count.py` looks at that)."""
    count_text("x")


@pytest.fixture
def make_kv() -> Iterator[Callable[..., AgentKV]]:
    """Makes an AgentKV that answers from a script; all are closed after the test."""
    made: list[AgentKV] = []

    def make(answers=None, *, engine=None, **options) -> AgentKV:
        engine = engine or ScriptedEngine(itertools.repeat("ok") if answers is None else answers)
        kv = AgentKV.with_engine(engine, host=LangGraphHost(), **options)
        made.append(kv)
        return kv

    yield make
    for kv in made:
        kv.close()


@pytest.fixture
def kv(make_kv) -> AgentKV:
    """An AgentKV that always answers "ok"."""
    return make_kv()


@pytest.fixture
def block_engine() -> type[BlockEngine]:
    return BlockEngine


@pytest.fixture
def hints(kv: AgentKV) -> list[Hint]:
    """Every hint of `kv`, in order."""
    heard: list[Hint] = []
    kv.subscribe(heard.append)
    return heard


@pytest.fixture
def user_repo(tmp_path):
    """A small code base of a user, with a test that takes a moment."""
    root = tmp_path / "users repo"
    (root / "tests").mkdir(parents=True)
    (root / "app.py").write_text("import os\n\n\ndef double(n):\n    return n + n  # " + "x" * 200 + "\n")
    (root / "tests" / "test_app.py").write_text(
        "import time\nfrom app import double\n\n\ndef test_double():\n    time.sleep(0.5)\n    assert double(2) == 4\n"
    )
    return root


@pytest.fixture
def serve() -> Iterator[Any]:
    """`serve("field", ...)`: a server that knows these fields besides its own."""
    with ExitStack() as servers:
        yield lambda *known: servers.enter_context(serving(*known))
