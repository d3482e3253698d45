"""StoreMemory: the surface of the SQLite memory over a LangGraph store, with vector search and without."""

import asyncio
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from agentkv_langgraph.memory import StoreMemory
from langgraph.store.memory import InMemoryStore

from agentkv import log
from agentkv.clock import ManualClock
from agentkv.context.memory import HashingEmbed, Memories, Memory, decide
from agentkv.errors import Closed, ConfigError

_spec = spec_from_file_location("memory_facts", Path(__file__).parents[1] / "context" / "memory_facts.py")
facts = module_from_spec(_spec)
_spec.loader.exec_module(facts)


def with_vectors():
    embed = HashingEmbed(256)
    return InMemoryStore(index={"dims": 256, "embed": lambda texts: embed(texts).tolist(), "fields": ["text"]})


class BrokenStore(InMemoryStore):
    """A store whose server is gone."""

    def batch(self, ops):
        raise ConnectionError("the store is gone")


class SlowStore(InMemoryStore):
    """A store that answers when it is let."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def batch(self, ops):
        self.go.wait(10)
        return super().batch(ops)


@pytest.fixture(params=[InMemoryStore, with_vectors], ids=["words only", "with vectors"])
def memory(request):
    with StoreMemory(request.param()) as memory:
        yield memory


def put(memory, *texts, **options):
    for text in texts:
        assert memory.remember(text, **options)
    assert memory.flush()


def test_planted_facts_are_found_again(memory):
    """Recall at 3 is at least 0.9, and what has no answer is not injected."""
    put(memory, *facts.PASSAGES)
    recalled = {question: memory.recall(question, k=3) for question, _ in facts.QUESTIONS}
    found = [facts.PASSAGES[n] in [one.text for one in recalled[question]] for question, n in facts.QUESTIONS]
    assert sum(found) / len(found) >= 0.9
    silent = [not decide(memory.recall(question)) for question in facts.UNANSWERED]
    assert sum(silent) >= 9


def test_a_memory_of_one_namespace_is_never_recalled_in_another(memory):
    """Not even where one name is the beginning of another: a store searches by prefix."""
    spaces = ["", "a", "a.b", "ab"]
    for number, space in enumerate(spaces):
        put(memory, f"The secret code word is {'zebra' * (number + 1)}.", namespace=space)
    for number, space in enumerate(spaces):
        found = [one.text for one in memory.recall("secret code word", namespace=space, k=20)]
        assert [f"The secret code word is {'zebra' * (number + 1)}."] == found


@pytest.mark.parametrize("make", [InMemoryStore, with_vectors])
def test_a_root_that_is_the_beginning_of_another_sees_nothing_of_it(make):
    """Two applications share one store."""
    store = make()
    with StoreMemory(store, root=("app",)) as one:
        space = one._space(None)
        with StoreMemory(store, root=space) as two:
            put(two, "The secret code word is zebra.")
            assert [] == one.recall("secret code word")
            assert 0 == one.forget(older_than_s=-10)
            assert 1 == len(two.recall("secret code word"))


def test_kinds_tags_and_origins_are_told(memory):
    """And select."""
    put(memory, "The port is 6543.", source="ops.md", tags=["db", "ops"], task="t1")
    put(memory, "Task 5 concluded: the port was wrong.", kind="episodic")
    (one,) = memory.recall("which port", kinds=["semantic"])
    assert ("ops.md", "t1", ("db", "ops"), "semantic") == (one.source, one.task, one.tags, one.kind)
    assert one.tokens > 3
    assert ["episodic"] == [found.kind for found in memory.recall("which port", kinds=["episodic"])]
    assert 1 == len(memory.recall("which port", tags=["db"]))


@pytest.mark.parametrize("make", [InMemoryStore, with_vectors])
def test_duplicates_are_stored_once_and_forgotten_by_origin(make):
    """The same as in the SQLite memory."""
    clock = ManualClock(wall_ms=1_000_000)
    with StoreMemory(make(), clock=clock) as memory:
        put(memory, "The port is 6543.", source="a.md")
        clock.advance(10)
        put(memory, "The port is 6543.", source="b.md")
        put(memory, "The port is 6543.", source="b.md")
        assert ["b.md"] == [one.source for one in memory.recall("port")]
        assert 0 == memory.forget(source="b.md")
        assert ["a.md"] == [one.source for one in memory.recall("port")]
        assert 1 == memory.forget(older_than_s=5)
        put(memory, "The port is 6543.", source="a.md")
        assert 1 == memory.forget(memory.recall("port")[0].id)
        assert [] == memory.recall("port")
        with pytest.raises(ConfigError, match="exactly one"):
            memory.forget()


def test_a_document_is_cut_into_passages(memory):
    """Each is found by itself, all are forgotten together."""
    put(memory, "".join(f"Server {n} of the cluster listens on port {n + 20_000}. " for n in range(300)), source="doc")
    assert "Server 123 " in memory.recall("server 123")[0].text
    assert memory.forget(source="doc") > 10


def test_a_store_that_is_gone_breaks_nothing():
    """Counted and logged; the agent goes on without memories."""
    before = log.counters["memory_recall_failed"], log.counters["memory_not_written"]
    with StoreMemory(BrokenStore()) as memory:
        assert memory.remember("The port is 6543.")
        memory.flush()
        assert [] == memory.recall("port")
    assert (before[0] + 1, before[1] + 1) == (log.counters["memory_recall_failed"], log.counters["memory_not_written"])


def test_nobody_waits_for_a_slow_store():
    """Remembering returns at once; the queue is bounded."""
    store = SlowStore()
    with StoreMemory(store, max_queue=10) as memory:
        start_s = time.perf_counter()
        taken = sum(memory.remember(f"fact {number}") for number in range(200))
        assert time.perf_counter() - start_s < 5
        assert 10 <= taken < 100
        store.go.set()
        assert memory.flush()


async def test_recalling_on_an_event_loop(memory):
    """On a worker thread."""
    put(memory, "The port is 6543.")
    found = await asyncio.gather(*(memory.arecall("port") for _ in range(5)))
    assert ["The port is 6543."] * 5 == [one[0].text for one in found]


@pytest.mark.parametrize("query", ["", " ", '" AND', "\0", "\ud800", "x" * 50_000])
def test_any_query_is_answered(memory, query):
    """With nothing, if there is nothing."""
    put(memory, "The port is 6543.", "lone \ud800 surrogate")
    assert isinstance(memory.recall(query), list)


def test_after_closing_it_is_closed_and_the_store_is_not():
    """Who opened it closes it."""
    store = InMemoryStore()
    memory = StoreMemory(store)
    memory.remember("The port is 6543.")
    memory.close()
    memory.close()
    assert 1 == len(store.search(()))
    with pytest.raises(Closed):
        memory.recall("port")
    with pytest.raises(Closed):
        memory.remember("port")


def test_both_backends_have_one_surface():
    """Whoever takes one takes the other."""
    names = {name for name in vars(Memories) if not name.startswith("_")}
    assert names == {"remember", "recall", "arecall", "forget", "flush", "close"}
    for kind in (Memory, StoreMemory):
        assert set() == {name for name in names if not callable(getattr(kind, name, None))}
