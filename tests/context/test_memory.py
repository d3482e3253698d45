"""Memory: what is remembered is found again, by its own namespace only, and nobody waits for it."""

# ruff: noqa: RUF001  the texts are written in the scripts that they stand for

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import blockbuster
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import log
from agentkv.clock import ManualClock
from agentkv.context.memory import KINDS, HashingEmbed, MeanPooled, Memory, decide, default_path, table
from agentkv.context.memory.embed import vectors_of
from agentkv.context.memory.queue import Queue
from agentkv.context.memory.terms import terms
from agentkv.errors import Closed, ConfigError

_spec = spec_from_file_location("memory_facts", Path(__file__).with_name("memory_facts.py"))
facts = module_from_spec(_spec)
_spec.loader.exec_module(facts)


class SlowEmbed:
    """An embedding that waits until it is let go, and fails on demand."""

    name = "slow"

    def __init__(self):
        self.go = threading.Event()
        self.fail = False
        self.calls = 0
        self.threads = set()

    def __call__(self, texts):
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(10)
        if self.fail:
            raise RuntimeError("out of memory")
        return HashingEmbed(64)(texts)


@pytest.fixture
def memory():
    with Memory() as memory:
        yield memory


def put(memory, *texts, **options):
    for text in texts:
        assert memory.remember(text, **options)
    assert memory.flush()


def texts_of(recalled):
    return [one.text for one in recalled]


def test_planted_facts_are_found_again(memory):
    """Recall at 3 is at least 0.9 over sixty passages in eight languages, with the embedding that needs nothing."""
    put(memory, *facts.PASSAGES)
    found = [facts.PASSAGES[n] in texts_of(memory.recall(question, k=3)) for question, n in facts.QUESTIONS]
    assert len(facts.PASSAGES) == 60
    assert sum(found) / len(found) >= 0.9


def test_what_answers_a_question_is_injected_and_what_does_not_is_not(memory):
    """The default threshold parts 22 questions with an answer from ten without."""
    put(memory, *facts.PASSAGES)
    answered = [decide(memory.recall(question)).texts[:1] == (facts.PASSAGES[n],) for question, n in facts.QUESTIONS]
    assert sum(answered) / len(answered) >= 0.9
    assert [] == [question for question in facts.UNANSWERED if decide(memory.recall(question))]


def test_what_is_recalled_says_where_it_is_from(memory):
    """Kind, source, task, tags, tokens and a score between 0 and 1."""
    put(memory, "The port is 6543.", source="ops.md", tags=["ops", "db"], task="t1")
    put(memory, "Task 5 concluded: the port was wrong.", kind="episodic", task="t5")
    (one, two) = memory.recall("Which port?")
    assert {"semantic", "episodic"} == {one.kind, two.kind}
    one = next(found for found in (one, two) if found.kind == "semantic")
    assert ("ops.md", "t1", ("db", "ops")) == (one.source, one.task, one.tags)
    assert 0 < one.score <= 1
    assert one.tokens > 3
    assert ["episodic"] == [found.kind for found in memory.recall("Which port?", kinds=["episodic"])]
    assert ["The port is 6543."] == texts_of(memory.recall("Which port?", tags=["db"]))
    assert [] == memory.recall("Which port?", tags=["db", "web"])


def test_a_memory_of_one_namespace_is_never_recalled_in_another():
    """Not even where it is the only answer, where names are prefixes of each other, or where ids are guessed."""
    with Memory(namespace="acme") as memory:
        spaces = ["acme", "acme2", "ac", "", "acme OR globex", '"', "*"]
        for number, space in enumerate(spaces):
            put(memory, f"The secret code word is {'zebra' * (number + 1)}.", namespace=space)
        for number, space in enumerate(spaces):
            mine = [f"The secret code word is {'zebra' * (number + 1)}."]
            assert mine == texts_of(memory.recall("secret code word zebra", namespace=space, k=20))
        assert memory.recall("secret code word") == memory.recall("secret code word", namespace="acme")
        theirs = memory.recall("secret", namespace="ac")[0]
        assert 0 == memory.forget(theirs.id)
        assert 0 == memory.forget(older_than_s=-10, namespace="nobody")
        assert len(spaces) == len(memory)


def test_a_crowd_in_another_namespace_hides_nothing():
    """Its passages take no place among the candidates, neither by words nor by vectors."""
    with Memory() as memory:
        put(memory, *(f"port port port {n}" for n in range(200)), namespace="loud")
        put(memory, "Our port is the one with a door in it, next to the lighthouse.", namespace="quiet")
        assert 1 == len(memory.recall("port", namespace="quiet", k=1))
        with memory._database.reading() as connection:
            assert [201] == table.by_words(connection, "quiet", ["port"], 10)
            assert [] == table.rows(connection, "quiet", KINDS, range(1, 200))


@pytest.mark.parametrize(
    "query",
    ['"', '""', "AND", "a AND", "NOT x", "NEAR(a b, 3)", "port*", "-port", "^port", "space : x", "terms:port", "(", ")",
     "port'; DROP TABLE passages; --", "\0", "\ud800 port", "{port}", "a+b", "port " * 5000, "x" * 100_000, "😀"],
)  # fmt: skip
def test_the_query_language_of_the_index_cannot_be_spoken(memory, query):
    """Whatever stands in a query is words."""
    before = log.counters["memory_recall_failed"]
    put(memory, "The port is 6543.")
    memory.recall(query)
    assert log.counters["memory_recall_failed"] == before
    assert 1 == len(memory)


@pytest.mark.parametrize("query", ["", "   ", "\n\t"])
def test_an_empty_query_finds_nothing(memory, query):
    """There is nothing to be like."""
    put(memory, "The port is 6543.")
    assert [] == memory.recall(query)
    assert [] == memory.recall("port", k=0)
    assert [] == memory.recall("port", kinds=[])


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=200), st.text(max_size=60))
def test_any_text_can_be_remembered_and_asked_for(text, query):
    """Whatever has a word is found by itself."""
    failures = log.counters["memory_recall_failed"] + log.counters["memory_not_written"]
    with Memory() as memory:
        memory.remember(text, source=query, tags=[query], task=query)
        assert memory.flush()
        memory.recall(query)
        memory.recall(text)
    assert failures == log.counters["memory_recall_failed"] + log.counters["memory_not_written"]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("代理计算两秒钟，然后等待三分钟。", "等待"),
        ("京都の天気は晴れです", "天気"),
        ("데이터베이스 비밀번호는 금고에 있습니다", "비밀번호"),
        ("ฐานข้อมูลอยู่ที่กรุงเทพ", "กรุงเทพ"),
        ("डेटाबेस का पासवर्ड तिजोरी में है", "पासवर्ड"),
        ("Größere Aufträge dauern", "auftrag grosser"),
        ("see getUserProfile in user_store.py", "user profile"),
        ("see getUserProfile in user_store.py", "UserStore"),
        ("caches are flushed", "flushing the cache"),
        ("字", "字"),
    ],
)
def test_any_script_is_found_by_its_words(memory, text, query):
    """Also where there are no spaces between them, and by other forms of a word."""
    put(memory, "something else entirely", text)
    assert text == memory.recall(query)[0].text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("flushing the caches", "flushed cache"),
        ("retries", "retry"),
        ("running", "run"),
        ("Straße", "STRASSE"),
        ("café", "cafe"),
        ("snake_case_name", "snake case name"),
        ("ﬁle", "file"),
        ("ＡＢＣ１２３", "abc123"),
    ],
)
def test_forms_of_a_word_are_one_term(text, same):
    """Endings, accents, case and width."""
    assert terms(same) == terms(text)


def test_a_queue_is_bounded_in_characters_too():
    """A few large documents are as many as a thousand facts; one alone always fits."""
    go, begun = threading.Event(), threading.Event()

    def write(_batch):
        begun.set()
        go.wait(10)

    queue = Queue(write, name="agentkv-test", max_entries=100, max_chars=1000)
    alone = queue.put("first", 5000)
    begun.wait(10)
    taken = [queue.put("next", 400) for _ in range(10)]
    go.set()
    flushed = queue.flush()
    queue.close()
    assert (True, [True, True, *[False] * 8], True) == (alone, taken, flushed)


def test_remember_returns_at_once():
    """Neither embedding nor disk is waited for, and nothing of it runs in the caller's thread."""
    embed = SlowEmbed()
    with Memory(embed=embed) as memory:
        start_s = time.perf_counter()
        for number in range(100):
            assert memory.remember(f"fact {number}")
        assert time.perf_counter() - start_s < 5
        assert 100 == memory.waiting
        assert not memory.flush(timeout_s=0.05)
        embed.go.set()
        assert memory.flush()
        assert {"agentkv-memory"} == embed.threads
        assert 100 == len(memory)


def test_a_full_queue_refuses_and_counts():
    """The oldest stay; nobody waits."""
    embed = SlowEmbed()
    before = log.counters["memory_full"]
    with Memory(embed=embed, max_queue=10) as memory:
        taken = [memory.remember(f"fact {number}") for number in range(100)]
        assert 10 <= sum(taken) <= 11 + 64  # what waits, and a batch that is being written
        assert log.counters["memory_full"] == before + 100 - sum(taken)
        embed.go.set()
        memory.flush()
        assert sum(taken) == len(memory)


async def test_nothing_blocks_the_event_loop(tmp_path):
    """Remembering, recalling on a thread and many of both at once make no blocking call in the loop."""
    with Memory(tmp_path / "m.sqlite") as memory:
        put(memory, "The port is 6543.")
        with blockbuster.blockbuster_ctx():
            with pytest.raises(blockbuster.BlockingError):
                time.sleep(0.001)  # noqa: ASYNC251  it watches
            for number in range(200):
                memory.remember(f"fact {number} " * 50)
            found = await asyncio.gather(*(memory.arecall("Which port?") for _ in range(10)))
        assert ["The port is 6543."] * 10 == [one[0].text for one in found]


async def test_the_loop_runs_on_while_a_large_document_is_written():
    """A heartbeat of 5 ms never misses half a second, where writing takes longer than that."""
    late, done = [], False

    async def beat():
        last_s = time.perf_counter()
        while not done:
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - last_s)
            last_s = time.perf_counter()

    with Memory() as memory:
        heart = asyncio.create_task(beat())
        start_s = time.perf_counter()
        memory.remember("".join(f"Server {n} listens on port {n + 7} at night. " for n in range(50_000)))
        await asyncio.to_thread(memory.flush, 60)
        took_s = time.perf_counter() - start_s
        done = True
        await heart
    assert max(late) < max(0.5, took_s / 3) < took_s


def test_duplicates_are_stored_once_and_each_origin_counts():
    """Forgetting one source leaves what another one says too; the newest is named."""
    clock = ManualClock()
    with Memory(clock=clock) as memory:
        for source in ("a.md", "b.md", "b.md"):
            clock.advance(1)
            put(memory, "The port is 6543.", source=source)
        assert 1 == len(memory)
        assert "b.md" == memory.recall("port")[0].source
        assert 0 == memory.forget(source="b.md")
        assert "a.md" == memory.recall("port")[0].source
        assert 1 == memory.forget(source="a.md")
        assert [] == memory.recall("port")


def test_the_same_text_as_fact_and_as_conclusion_is_recalled_once(memory):
    """Both are stored, one is enough in an answer."""
    put(memory, "The port is 6543.")
    put(memory, "The port is 6543.", kind="episodic")
    assert 2 == len(memory)
    assert 1 == len(memory.recall("port"))


def test_forgetting_by_id_and_by_age():
    """Neither words nor vectors find it any more; what was remembered again is young."""
    clock = ManualClock(wall_ms=1_000_000)
    with Memory(clock=clock) as memory:
        put(memory, "The old port is 1111.", "The kept port is 2222.")
        clock.advance(100)
        put(memory, "The kept port is 2222.", "The new port is 3333.")
        assert 1 == memory.forget(older_than_s=50)
        assert {"The kept port is 2222.", "The new port is 3333."} == set(texts_of(memory.recall("port", k=9)))
        kept = next(one for one in memory.recall("port") if "kept" in one.text)
        assert 1 == memory.forget(kept.id)
        assert ["The new port is 3333."] == texts_of(memory.recall("port", k=9))
        assert 0 == memory.forget(kept.id)
        assert 1 == len(memory._known[""].vectors)
        with memory._database.reading() as connection:
            assert [(1,)] == connection.execute("SELECT count(*) FROM words").fetchall()
            assert [(1,)] == connection.execute("SELECT count(*) FROM origins").fetchall()


def test_forgetting_covers_what_is_still_waiting():
    """What was remembered a moment ago is forgotten too."""
    with Memory() as memory:
        memory.remember("The port is 6543.", source="a.md")
        assert 1 == memory.forget(source="a.md")


@pytest.mark.parametrize("options", [{}, {"source": "a", "older_than_s": 1.0}])
def test_forget_wants_exactly_one_choice(memory, options):
    """No call forgets everything by mistake."""
    with pytest.raises(ConfigError, match="exactly one"):
        memory.forget(**options)


def test_the_oldest_go_where_there_are_too_many():
    """A bound on the file, counted."""
    clock = ManualClock()
    with Memory(max_passages=10, clock=clock) as memory:
        for number in range(25):
            clock.advance(1)
            put(memory, f"fact number {number}")
        assert 10 == len(memory)
        assert {f"fact number {n}" for n in range(15, 25)} == set(texts_of(memory.recall("fact number", k=50)))


def test_memories_survive_a_restart(tmp_path):
    """The file and its log are readable by the user only."""
    path = tmp_path / "deep" / "memory.sqlite"
    with Memory(path) as memory:
        put(memory, "The port is 6543.", kind="episodic")
        assert {0o600} == {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        assert 0o700 == stat.S_IMODE(path.parent.stat().st_mode)
    with Memory(path) as memory:
        assert ["The port is 6543."] == texts_of(memory.recall("port"))


def test_what_waits_is_written_when_the_memory_closes(tmp_path):
    """And close may be called twice; afterwards nothing may."""
    memory = Memory(tmp_path / "m.sqlite")
    for number in range(300):
        memory.remember(f"fact {number}")
    memory.close()
    memory.close()
    for call in (
        lambda: memory.remember("x"),
        lambda: memory.recall("x"),
        lambda: memory.forget(1),
        lambda: len(memory),
    ):
        with pytest.raises(Closed):
            call()
    with Memory(tmp_path / "m.sqlite") as again:
        assert 300 == len(again)


def test_a_program_that_ends_without_closing_keeps_what_it_learnt(tmp_path):
    """The thread writes before the interpreter goes."""
    code = (
        f"from agentkv.context.memory import Memory; m = Memory({str(tmp_path / 'm.sqlite')!r}); m.remember('the port')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    with Memory(tmp_path / "m.sqlite") as memory:
        assert 1 == len(memory)


def test_forgetting_to_close_warns():
    """Owners are context managers."""
    memory = Memory()
    with pytest.warns(ResourceWarning, match="not closed"):
        memory.__del__()
    memory.close()


def test_another_object_on_the_same_file_is_seen(tmp_path):
    """What one writes or forgets, the other recalls or does not."""
    with Memory(tmp_path / "m.sqlite") as one, Memory(tmp_path / "m.sqlite") as two:
        put(one, "The port is 6543.")
        assert ["The port is 6543."] == texts_of(two.recall("port"))
        put(two, "The port of the web server is 80.", source="web")
        assert 2 == len(one.recall("port"))
        one.forget(source="web")
        assert ["The port is 6543."] == texts_of(two.recall("port"))


def test_several_processes_write_one_file(tmp_path):
    """Started together on no file: nothing is lost, nothing is doubled."""
    code = (
        "import sys; from agentkv.context.memory import Memory\n"
        "with Memory(sys.argv[1]) as memory:\n"
        "    for number in range(60):\n"
        "        memory.remember(f'fact {number} of {sys.argv[2]}'); memory.remember(f'common fact {number}')\n"
        "        memory.flush() if number % 10 == 0 else None\n"
    )
    path = str(tmp_path / "m.sqlite")
    runs = [
        subprocess.Popen([sys.executable, "-c", code, path, str(n)], stderr=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    assert [""] * 4 == [run.communicate(timeout=200)[1] for run in runs]
    with Memory(path) as memory:
        assert 4 * 60 + 60 == len(memory)
        assert "fact 7 of 3" == memory.recall("fact 7 of 3")[0].text


@pytest.mark.parametrize("damage", ["garbage", "truncated", "overwritten"])
def test_a_damaged_file_is_kept_aside_and_a_fresh_one_begins(tmp_path, damage):
    """One line in the log; what comes later is kept."""
    path = tmp_path / "m.sqlite"
    with Memory(path) as memory:
        put(memory, *(f"The port of server {number} is {number}." for number in range(300)))
    data = path.read_bytes()
    broken = {
        "garbage": b"this is no database " * 100,
        "truncated": data[: len(data) // 2],
        "overwritten": data[:4096] + os.urandom(len(data) - 4096),
    }
    path.write_bytes(broken[damage])
    before = log.counters["memory_damaged"]
    with Memory(path) as memory:
        memory.recall("server 7")
        put(memory, "The new port is 6543.")
        assert "The new port is 6543." == memory.recall("new port 6543")[0].text
    assert log.counters["memory_damaged"] == before + 1
    kept = min((file for file in tmp_path.iterdir() if ".aside-" in file.name), key=lambda file: len(file.name))
    assert broken[damage][:4096] == kept.read_bytes()[:4096]


def test_threads_that_find_the_damage_together_replace_the_file_once(tmp_path):
    """Neither do they wait for each other forever, nor is the fresh file put aside."""
    path = tmp_path / "m.sqlite"
    with Memory(path) as memory:
        put(memory, *(f"The port of server {number} is {number}." for number in range(300)))
    data = path.read_bytes()
    path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    before = log.counters["memory_damaged"]
    with Memory(path) as memory:
        together = threading.Barrier(8)

        def run(number):
            together.wait()
            memory.remember(f"The new port of {number} is {number}.")
            for _ in range(5):
                memory.recall("server 7")

        threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert memory.flush()
        assert [] == [thread for thread in threads if thread.is_alive()]
        assert 8 == len(memory)
    assert log.counters["memory_damaged"] == before + 1


def test_who_has_the_damaged_file_open_too_goes_on_with_the_fresh_one(tmp_path):
    """It begins afresh in place and once: nobody's later memories are put aside or lost."""
    path = tmp_path / "m.sqlite"
    before = log.counters["memory_damaged"]
    with Memory(path) as one, Memory(path) as two:
        put(one, *(f"The port of server {number} is {number}." for number in range(300)))
        two.recall("server")
        one._database._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(size - 4096))
        for memory in (one, two):
            memory.recall("server 7 port")
            put(memory, "Something else entirely.")
        put(one, "The new port is 6543.")
        put(two, "The newest port is 7777.")
        for memory in (one, two):
            expected = {"The new port is 6543.", "The newest port is 7777."}
            assert expected == {one.text for one in memory.recall("port", k=9) if "port" in one.text}
            assert len(memory) == len(memory._known[""].vectors)
    assert log.counters["memory_damaged"] == before + 1
    assert 0o600 == stat.S_IMODE(next(tmp_path.glob("*.aside-*")).stat().st_mode)


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path):
    """A person has to decide."""
    import sqlite3

    path = tmp_path / "m.sqlite"
    Memory(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    data = path.read_bytes()
    with pytest.raises(ConfigError, match="schema version 99"):
        Memory(path)
    assert data == path.read_bytes()


def test_a_place_that_cannot_hold_a_file_is_a_clear_error(tmp_path):
    """Not an error of the database's."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be"):
        Memory(tmp_path / "file" / "m.sqlite")
    with pytest.raises(ConfigError, match="cannot be"):
        Memory(tmp_path)


@pytest.mark.parametrize(
    "options", [{"max_passages": 0}, {"max_queue": 0}, {"passage_chars": 3}, {"embed": HashingEmbed, "nonsense": 1}]
)
def test_options_that_cannot_work_are_refused(options):
    """When the memory is made, with the number."""
    with pytest.raises((ConfigError, TypeError)):
        Memory(**options)


def test_an_unknown_kind_is_refused(memory):
    """There are two."""
    with pytest.raises(ConfigError, match="procedural"):
        memory.remember("x", kind="procedural")


def test_a_document_of_five_megabytes_is_written_in_linear_time():
    """Twice the text takes about twice as long; each sentence is found again."""
    sentence = "Server {} of the cluster listens on port {} and is backed up at night. "
    seconds = []
    for size in (10_000, 20_000):
        document = "".join(sentence.format(n, n * 7 % 9973) for n in range(size))
        with Memory() as memory:
            start_s = time.perf_counter()
            memory.remember(document, source="cluster.txt")
            assert memory.flush(60)
            seconds.append(time.perf_counter() - start_s)
            assert "Server 9980 " in memory.recall("server 9980", k=1)[0].text
            assert len(memory) == memory.forget(source="cluster.txt")
    assert seconds[1] < 3.5 * seconds[0]


def test_an_embedding_that_fails_leaves_the_words():
    """Counted, logged, and made up for once it works again."""
    embed = SlowEmbed()
    embed.go.set()
    embed.fail = True
    before = log.counters["memory_embed_failed"]
    with Memory(embed=embed) as memory:
        put(memory, "The port is 6543.")
        assert ["The port is 6543."] == texts_of(memory.recall("port"))
        assert log.counters["memory_embed_failed"] == before + 2
        embed.fail = False
        assert ["The port is 6543."] == texts_of(memory.recall("port"))
        assert 0 == len(memory._known[""].vectors)
        memory.flush()
        assert ["The port is 6543."] == texts_of(memory.recall("port"))
        assert 1 == len(memory._known[""].vectors)


@pytest.mark.parametrize(
    "rows", [lambda n: [[float("nan")] * 8] * n, lambda n: [[1.0] * 8] * (n + 1), lambda n: [1.0] * n]
)
def test_an_embedding_that_answers_nonsense_leaves_the_words(rows):
    """Neither NaN nor a wrong shape gets into the index."""
    with Memory(embed=lambda texts: rows(len(texts))) as memory:
        put(memory, "The port is 6543.", "x y z")
        assert "The port is 6543." == memory.recall("port")[0].text
        assert {} == memory._known


@pytest.mark.parametrize("dimensions", [64, 128])
def test_another_embedding_takes_over_what_an_earlier_one_wrote(tmp_path, dimensions):
    """Its vectors are made by the thread, also where they have as many numbers; until then the words find it."""
    with Memory(tmp_path / "m.sqlite", embed=HashingEmbed(64)) as memory:
        put(memory, *facts.PASSAGES[:20])
    other = HashingEmbed(dimensions)
    other.name = "other"
    with Memory(tmp_path / "m.sqlite", embed=other) as memory:
        assert facts.PASSAGES[0] == memory.recall(facts.QUESTIONS[0][0])[0].text
        assert 0 == len(memory._known[""].vectors)
        memory.flush()
        assert facts.PASSAGES[0] == memory.recall(facts.QUESTIONS[0][0])[0].text
        assert (20, dimensions) == (len(memory._known[""].vectors), memory._known[""].vectors.dimensions)


def test_the_hashing_embedding_is_the_same_in_every_process():
    """Whatever the hash seed; vectors are kept on disk."""
    code = (
        "import json; from agentkv.context.memory import HashingEmbed\n"
        "print(json.dumps(HashingEmbed(64)(['the port of 数据库 is 6543'])[0].tolist()))"
    )
    own = HashingEmbed(64)(["the port of 数据库 is 6543"])[0].tolist()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert own == json.loads(run.stdout)


@pytest.mark.slow
def test_a_transformers_encoder_is_an_embedding():
    """The mean over the text's own tokens: padding beside a longer text changes nothing."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )

    class Letters:
        def __call__(self, texts, *, padding, truncation, max_length, return_tensors):
            rows = [[ord(letter) % 300 for letter in text][:max_length] for text in texts]
            width = max(map(len, rows))
            return {
                "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
                "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
            }

    embed = MeanPooled(Letters(), transformers.BertModel(config), name="tiny", batch=2)
    alone = embed(["the port"])
    beside = embed(["the port", "a much longer text than that", "third"])
    assert (3, 32) == beside.shape
    np.testing.assert_allclose(alone[0], beside[0], atol=1e-5)
    np.testing.assert_allclose(np.ones(3), np.linalg.norm(beside, axis=1), atol=1e-5)
    with Memory(embed=embed) as memory:
        put(memory, "The port is 6543.", "Something else.")
        assert "The port is 6543." == memory.recall("port")[0].text


def test_vectors_have_length_one_whatever_the_embedding_gives():
    """A cosine is a product then."""
    np.testing.assert_allclose([1.0], np.linalg.norm(vectors_of(lambda _t: [[3.0, 4.0]], ["x"]), axis=1), rtol=1e-6)


def test_recalling_among_10000_passages_takes_less_than_50_ms():
    """The fastest of a few, on a machine that does other things too."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in (rng.pareto(0.8, 200_000) * 10).astype(int) % 20_000])
    with Memory(max_queue=20_000) as memory:
        for number in range(10_000):
            memory.remember(" ".join(rng.choice(words, 30)) + f" unique{number}")
        assert memory.flush(60)
        memory.recall("warm up")
        fastest_s = 1.0
        for number in range(8):
            query = f"which {rng.choice(words)} and {rng.choice(words)} is with unique{number * 997}"
            start_s = time.perf_counter()
            found = memory.recall(query)
            fastest_s = min(fastest_s, time.perf_counter() - start_s)
            assert any(f"unique{number * 997}" in one.text for one in found)
    assert fastest_s < 0.05


def test_threads_write_and_recall_together(tmp_path):
    """Eight of them, no failure, every text there in the end."""
    failures = log.counters["memory_recall_failed"] + log.counters["memory_not_written"]
    with Memory(tmp_path / "m.sqlite") as memory:

        def run(number):
            for turn in range(30):
                memory.remember(f"fact {turn} of thread {number}", source=f"s{number}")
                memory.recall(f"fact {turn}", k=3)
                if turn % 10 == 9:
                    memory.forget(source=f"s{number}-none")

        threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory.flush()
        assert 240 == len(memory)
    assert failures == log.counters["memory_recall_failed"] + log.counters["memory_not_written"]


def test_the_default_file_is_in_the_users_data_folder(monkeypatch, tmp_path):
    """AGENTKV_DATA moves it."""
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path))
    assert tmp_path / "memory.sqlite" == default_path()
    monkeypatch.delenv("AGENTKV_DATA")
    assert "memory.sqlite" == default_path().name
