"""The engine as its callers see it: tokens equal transformers', whatever the schedule; nothing leaks, nobody hangs."""

import contextlib
import random
import threading
import time

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller, PriorityClass
from agentkv.engine.base import Request, Sampling
from agentkv.errors import Closed, ConfigError, GenerationCancelled, PromptTooLong, RequestInvalid

TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "


def _prompt(number, length=120):
    return (f"{number}: " + TEXT * 8)[:length]


def _idle(engine, within_s=10.0):
    """Wait until no call is left and every block is unpinned."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        stats = engine.stats()
        device = stats["kv"]["device"]
        if not stats["running"] + stats["loading"] + stats["waiting"] + device["private"] + device["pinned"]:
            return stats
        time.sleep(0.005)
    raise AssertionError(f"not idle: {stats}")


def _evict(engine, session, to=Tier.HOST):
    """Demote a session and take its copies in dearer tiers away."""
    done = threading.Event()
    engine.apply(Move(session=session, action=Action.DEMOTE, to=to, reason="test"), lambda _receipt: done.set())
    assert done.wait(10)
    count = engine.tiers.num_blocks
    blocks = None
    while blocks is None:
        blocks = engine.tiers.allocate(count)
    engine.tiers.pool[blocks] = float("nan")  # whatever is read from here on is a loaded copy
    engine.tiers.release(session, blocks, used=engine.tiers.streams.record())
    if to == Tier.DISK:  # somebody else's blocks take the host tier
        request = Request(prompt="y" * 210, sampling=Sampling(max_tokens=2), caller=Caller(task=f"not {session}"))
        _evict(engine, engine.submit(request).result(60).session)
        assert 0 == engine.residency(session).host_blocks


# -- tokens


def test_greedy_tokens_equal_transformers(any_tiny, start, ask):
    """One call at a time, on every supported family."""
    engine = start(model=any_tiny)
    for number in range(3):
        prompt = _prompt(number, 50 + 33 * number)
        generation = engine.submit(ask(prompt, 40)).result(60)
        assert any_tiny.greedy(prompt, 40) == list(generation.token_ids)


@pytest.mark.parametrize("chunk_tokens", [7, 16, 512])
def test_chunked_prefill_mixed_with_decode_changes_no_token(tiny, start, ask, chunk_tokens):
    """Calls that arrive while others decode are prefilled in chunks between their tokens."""
    engine = start(chunk_tokens=chunk_tokens)
    prompts = [_prompt(i, 30 + 41 * i) for i in range(6)]
    streams = []
    for prompt in prompts:
        streams.append(engine.submit(ask(prompt, 30)))
        time.sleep(0.01)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert tiny.greedy(prompt, 30) == list(stream.result(60).token_ids)


def test_what_earlier_owners_left_in_a_block_reaches_nobody(tiny, start, ask):
    """A batch reads past the end of its shorter sequences, masked; NaN there must not come through."""
    engine = start()
    engine.tiers.pool[1:] = float("nan")
    prompts = [_prompt(i, 24 + 5 * i) for i in range(4)]
    streams = [engine.submit(ask(prompt, 30)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert tiny.greedy(prompt, 30) == list(stream.result(60).token_ids)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 32, 512])
def test_a_prompt_cut_down_to_one_token_beside_others_reads_nobodys_leftovers(tiny, start, ask, chunk_tokens):
    """One token of a prompt is computed in a step with tokens of answers; it ends in a block that nobody cleared."""
    engine = start(blocks=96, chunk_tokens=chunk_tokens, speculate=False)
    engine.tiers.pool[1:] = float("nan")
    neighbour = engine.submit(ask("a neighbour", 200))
    next(iter(neighbour))
    held, on, step = threading.Event(), threading.Event(), engine._step

    def stepping():
        held.set()
        on.wait(60)
        return step()

    engine._step = stepping
    held.wait(60)
    lengths = ([chunk_tokens - 1] if 1 < chunk_tokens else []) + [60, 41, chunk_tokens + 1]  # all arrive in one step
    prompts = [_prompt(i, length) for i, length in enumerate(lengths)]
    streams = [engine.submit(ask(prompt, 4)) for prompt in prompts]
    on.set()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert tiny.greedy(prompt, 4) == list(stream.result(60).token_ids)
        assert tiny.greedy(prompt, 4) == list(engine.submit(ask(prompt, 4, task="another")).result(60).token_ids)
    neighbour.cancel()


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 1])
def test_full_hits_reuse_at_most_all_but_the_last_token(tiny, start, ask, length):
    """At block borders the last token is computed anyway, and the repeated answer equals the first (K18)."""
    engine = start()
    prompt = _prompt(0, length)
    expected = tiny.greedy(prompt, 8)
    cached = []
    for task in ("a", "b", "c"):
        generation = engine.submit(ask(prompt, 8, task=task)).result(60)
        assert expected == list(generation.token_ids)
        cached.append(generation.usage.cached_tokens)
    full = (length - 1) // 16 * 16
    assert [0, full, full] == cached


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_a_session_continues_from_a_slower_tier_with_the_same_tokens(tiny, start, ask, tmp_path, to):
    """Its device blocks were overwritten meanwhile; the next turn loads them back and computes only what is new (K20)."""
    engine = start(host=13, disk=tmp_path, disk_memory=64 << 20) if to == Tier.DISK else start()
    first = engine.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _evict(engine, first.session, to)
    prompt = _prompt(0, 200) + first.text + " Go on."
    second = engine.submit(ask(prompt, 20, task="t")).result(60)
    assert first.session == second.session
    assert 14 == engine.stats()["kv"]["hits"]["disk" if to == Tier.DISK else "host"]
    assert 219 == second.usage.cached_tokens
    assert second.timing.restore_s > 0
    assert len(tiny.ids(prompt)) == second.usage.input_tokens
    assert tiny.greedy(prompt, 20) == list(second.token_ids)


def test_restored_equals_kept_bit_for_bit(tiny, start, ask):
    """Under the same schedule, logits after a restore are those of a context that never left (design section 5)."""
    seen = {}
    for evict in (False, True):
        engine = start()
        rows = []
        forward = engine._runner.forward
        engine._runner.forward = lambda spans, forward=forward, rows=rows: rows.append(forward(spans)) or rows[-1]
        first = engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
        if evict:
            _evict(engine, first.session)
        rows.clear()
        engine.submit(ask(_prompt(0, 200) + first.text + "!", 24, task="t")).result(60)
        seen[evict] = [row.clone() for row in rows]
    assert len(seen[False]) == len(seen[True]) > 1
    assert all(kept.equal(restored) for kept, restored in zip(seen[False], seen[True], strict=True))


def test_a_corrupted_copy_is_recomputed_never_used(tiny, start, ask, tmp_path):
    """A flipped bit on disk costs a recompute of what follows; tokens stay right (K7)."""
    engine = start(disk=tmp_path, disk_memory=64 << 20, host=13)
    first = engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    _evict(engine, first.session, Tier.DISK)
    (segment,) = tmp_path.rglob("segment-*")
    with segment.open("r+b") as file:
        file.seek(5 * engine.tiers.geometry.slot_bytes + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    prompt = _prompt(0, 200) + first.text + "?"
    second = engine.submit(ask(prompt, 20, task="t")).result(60)
    assert tiny.greedy(prompt, 20) == list(second.token_ids)
    assert 1 == engine.stats()["kv"]["checksum_failures"]
    assert 0 < second.usage.cached_tokens < 192
    assert second.timing.recompute_s > 0


@pytest.mark.parametrize("host", [0, 8, 64])
def test_preempted_calls_finish_with_the_same_tokens(tiny, start, ask, host):
    """A pool for about two of four calls: the younger ones are sent back and come again; nobody hangs (E22)."""
    engine = start(blocks=18, host=host)
    prompts = [_prompt(i, 60) for i in range(4)]
    streams = [engine.submit(ask(prompt, 90, sampling=_unending(90))) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        generation = stream.result(60)
        expected = tiny.greedy(prompt, 90)
        assert expected == list(generation.token_ids)[: len(expected)]
    assert engine.stats()["preemptions"] > 0
    _idle(engine)


def _unending(count):
    return Sampling(max_tokens=count)


@pytest.mark.parametrize("host", [0, 24, 120])
def test_all_sessions_waiting_with_memory_full_still_progress(tiny, start, ask, host):
    """Eight sessions take turns over a pool that holds one and a half of them."""
    engine = start(blocks=20, host=host)
    texts = {i: _prompt(i, 150) for i in range(8)}
    for _turn in range(2):
        streams = {i: engine.submit(ask(text, 10, task=f"t{i}")) for i, text in texts.items()}
        for i, stream in streams.items():
            generation = stream.result(60)
            assert tiny.greedy(texts[i], 10) == list(generation.token_ids)
            texts[i] += generation.text + " more"
    stats = _idle(engine)
    assert (stats["kv"]["hits"]["host"] > 0) == (host == 120)


# -- sampling and ends


def test_a_seed_decides_alone(start, ask):
    """Same seed, same text, with or without neighbours in the batch; other seeds and none differ (E17)."""
    engine = start()
    warm = Sampling(max_tokens=24, temperature=1.5, top_p=0.95, seed=7)
    alone = engine.submit(ask(_prompt(0), sampling=warm)).result(60)
    streams = [engine.submit(ask(_prompt(i), 24)) for i in range(1, 4)]
    crowded = engine.submit(ask(_prompt(0), sampling=warm)).result(60)
    for stream in streams:
        stream.result(60)
    free = [
        engine.submit(ask(_prompt(0), sampling=Sampling(max_tokens=24, temperature=1.5))).result(60).token_ids
        for _ in range(3)
    ]
    assert alone.token_ids == crowded.token_ids
    assert 3 == len(set(free))


def test_forced_tokens_come_out_as_given(tiny, start, ask):
    """A replay emits its ids, control tokens included, and streams whole characters."""
    engine = start()
    ids = (*tiny.ids("příliš žluťoučký 👨‍👩‍👧 한글"), 257)
    stream = engine.submit(ask("x", None, forced_ids=ids))
    pieces = [chunk.text for chunk in stream]
    generation = stream.result()
    assert ids == generation.token_ids
    assert "příliš žluťoučký 👨‍👩‍👧 한글" == generation.text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "stop" == generation.finish_reason


def test_a_character_cut_by_max_tokens_is_flushed_once(tiny, start, ask):
    """Half a character at the end becomes one replacement character, as decoding all ids would give."""
    engine = start()
    ids = tuple(tiny.ids("ab€"))
    generation = engine.submit(ask("x", 4, forced_ids=ids)).result(60)
    assert ids[:4] == generation.token_ids
    assert "ab\ufffd" == generation.text
    assert "length" == generation.finish_reason


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("lo wo",), "hel"),
        (("xyz",), "hello world"),
        (("world", "lo"), "hel"),
        (("hello world and more",), "hello world"),
    ],
)
def test_stop_strings_across_token_borders(tiny, start, ask, stop, expected):
    """One byte per token: a stop string spans many; its text is never shown, a near miss is released (E12)."""
    engine = start()
    ids = tuple(tiny.ids("hello world"))
    stream = engine.submit(ask("x", sampling=Sampling(max_tokens=50, stop=stop), forced_ids=ids))
    pieces = "".join(chunk.text for chunk in stream)
    assert (expected, expected) == (pieces, stream.result().text)
    assert "stop" == stream.result().finish_reason


def test_end_tokens_end_the_call(tiny, start, ask):
    """The model's own end token is counted and not shown."""
    engine = start()
    generation = engine.submit(ask(_prompt(0), 400)).result(60)
    expected = tiny.greedy(_prompt(0), 400)
    assert expected == list(generation.token_ids)
    assert len(expected) == generation.usage.output_tokens
    assert ("stop" if expected[-1] == 257 else "length") == generation.finish_reason


# -- refusals


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(start, ask):
    """Nothing is started, and the next call works (E21)."""
    engine = start(blocks=200)
    for text, count, needed in (("x" * 2000, 5, 2005), ("x" * 1000, 100, 1100)):
        with pytest.raises(
            PromptTooLong, match=f"{needed} tokens do not fit into the model's context of 1024"
        ) as error:
            engine.submit(ask(text, count))
        assert (needed, 1024) == (error.value.needed_tokens, error.value.limit_tokens)
    assert engine.submit(ask("x", 3)).result(60).token_ids


@pytest.mark.parametrize("host", [0, 16])
def test_a_turn_that_fills_the_device_to_the_last_token_is_answered(tiny, start, ask, host):
    """There is no place for a copy of its partial block beside it: that one is computed again, and nobody waits for ever."""
    engine = start(blocks=4, host=host)
    first = engine.submit(ask("a first turn of a call", 4, task="t")).result(30)
    prompt = "a first turn of a call" + first.text
    prompt += "and then more, so that it is as long as it can be. Is it?"[: 60 - len(prompt)]
    second = engine.submit(ask(prompt, 4, task="t")).result(30)
    assert tiny.greedy(prompt, 4) == list(second.token_ids)
    assert 16 == second.usage.cached_tokens


def test_a_prompt_that_the_pool_can_never_hold_is_refused(start, ask):
    """The context would do, the device memory would not."""
    engine = start(blocks=8)
    with pytest.raises(PromptTooLong, match="150 tokens do not fit into the device memory's 128"):
        engine.submit(ask("x" * 140, 10))
    filled = engine.submit(ask("x" * 100, None)).result(60)
    assert filled.usage.total_tokens <= 128


@pytest.mark.parametrize("ids", [(), (-1,), (259,), (10**9,)])
def test_forced_ids_outside_of_the_vocabulary_are_refused(tiny, start, ask, ids):
    """They would read outside of the embedding; the good stream beside them comes out as if it were alone (E19)."""
    engine = start()
    good = engine.submit(ask(_prompt(1), 20))
    with pytest.raises(RequestInvalid, match="forced_ids"):
        engine.submit(ask("x", forced_ids=ids))
    assert tiny.greedy(_prompt(1), 20) == list(good.result(60).token_ids)


@pytest.mark.parametrize("prompt", ["", "a\ud800b"])
def test_a_prompt_without_tokens_is_refused(start, ask, prompt):
    """An empty one says nothing, half a surrogate pair cannot be tokenised (E20)."""
    with pytest.raises(RequestInvalid) as error:
        start().submit(ask(prompt))
    assert "prompt" == error.value.param


def test_sizes_that_cannot_work_are_refused_at_construction(start, tmp_path):
    """No thread and no file is left behind."""
    threads = threading.active_count()
    for options in ({"blocks": 1}, {"chunk_tokens": 0}, {"max_batch": 0}, {"blocks": 0, "disk": tmp_path}):
        with pytest.raises(ConfigError):
            start(**options)
    assert threads == threading.active_count()
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_session_of_another_task_is_refused(start, ask):
    """A session belongs to one task: its bill and its end depend on it."""
    engine = start()
    session = engine.submit(ask("x", 2, task="one")).result(60).session
    with pytest.raises(RequestInvalid, match="belongs to task 'one'"):
        engine.submit(ask("x", 2, task="two", session=session))


# -- ends


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_calls_free_everything_wherever_they_are(tiny, start, ask, tmp_path, seed):
    """Cancelled in the queue, in a restore, in prefill and in decode: blocks, pins and calls go to zero (E23)."""
    engine = start(blocks=40, host=60, chunk_tokens=16, disk=tmp_path, disk_memory=64 << 20)
    dice = random.Random(seed)
    endless = tuple(tiny.ids("x" * 300))  # far more steps than anybody waits for: no call ends before it is cancelled
    for _round in range(25):
        prompts = [(f"t{dice.randrange(5)}", _prompt(dice.randrange(4), dice.randrange(20, 250))) for _ in range(4)]
        streams = [engine.submit(ask(prompt, None, task=task, forced_ids=endless)) for task, prompt in prompts]
        time.sleep(dice.random() * 0.02)
        for stream in streams:
            stream.cancel()
        session = engine.last_session(Caller(task=f"t{dice.randrange(5)}"))
        if session:
            engine.apply(
                Move(session=session, action=dice.choice([Action.DEMOTE, Action.WRITE]), to=Tier.HOST, reason="")
            )
        for stream in streams:
            with contextlib.suppress(GenerationCancelled):  # a machine that stood still may have let one end
                stream.result(20)
    stats = _idle(engine)
    assert 100 == stats["cancelled"] + stats["completed"]
    assert stats["cancelled"] > 50
    engine.tiers.check()
    generation = engine.submit(ask(_prompt(1, 200), 20)).result(60)
    assert tiny.greedy(_prompt(1, 200), 20) == list(generation.token_ids)


def test_close_ends_pending_calls_and_is_idempotent(start, ask):
    """Queued and running calls fail with Closed; later ones are refused."""
    engine = start(blocks=20)
    streams = [engine.submit(ask(_prompt(i, 150), 100)) for i in range(4)]
    engine.close()
    engine.close()
    for stream in streams:
        with pytest.raises(Closed):
            stream.result(20)
    with pytest.raises(Closed):
        engine.submit(ask("x"))


def test_a_finished_task_frees_its_blocks(start, ask):
    """Nothing is written; a call still running is cleared away when it ends."""
    engine = start()
    engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    late = engine.submit(ask(_prompt(1, 200), 60, task="t"))
    next(iter(late))
    engine.finish_task("t")
    late.result(60)
    stats = _idle(engine)
    assert 0 == stats["kv"]["device"]["used"] == stats["kv"]["bytes"]["d2h"] == stats["sessions"]
    assert engine.last_session(Caller(task="t")) is None


def test_a_step_that_fails_ends_its_calls_and_no_others(tiny, start, ask, monkeypatch):
    """The engine survives an exception in the model."""
    engine = start()
    monkeypatch.setattr(engine._runner, "forward", lambda _spans: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        engine.submit(ask("x", 4)).result(20)
    monkeypatch.undo()
    assert tiny.greedy("x", 4) == list(engine.submit(ask("x", 4)).result(20).token_ids)
    _idle(engine)


@pytest.mark.parametrize("told", ["", "ab"])
@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_call_that_ends_inside_a_character_leaves_nothing_behind_for_the_next(tiny, start, ask, told, half):
    """Bytes that had no text yet are no part of a prompt that is sent again, with or without the text there was."""
    engine = start()
    forward, left = engine._runner.forward, [len(told) + half]

    def fails_later(spans):
        left[0] -= 1
        return forward(spans) if left[0] >= 0 else 1 / 0

    engine._runner.forward = fails_later
    prompt = _prompt(0, 30)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        engine.submit(ask(prompt, 8, task="t", forced_ids=tuple(tiny.ids(f"{told}😀 and more")))).result(60)
    engine._runner.forward = forward
    again = engine.submit(ask(prompt + told, 8, task="t")).result(60)
    assert 30 + len(told) == again.usage.input_tokens
    assert tiny.greedy(prompt + told, 8) == list(again.token_ids)


# -- order, sharing, accounts


def test_the_earliest_task_goes_first_and_a_person_before_it(start, ask):
    """With room for one, the queue is served by class, then by the task's age, not by arrival."""
    engine = start(max_batch=1)
    engine.submit(ask("first", 2, task="old")).result(60)
    ended = []
    blocker = engine.submit(ask(_prompt(9), 60, task="blocker"))
    next(iter(blocker))
    streams = {
        name: engine.submit(ask(f"{name} asks", 3, task=task, priority=priority))
        for name, task, priority in (
            ("batch", "b", PriorityClass.BATCH), ("new", "new", PriorityClass.STEP), ("old", "old", PriorityClass.STEP),
            ("person", "p", PriorityClass.FOREGROUND),
        )
    }  # fmt: skip
    waiters = [
        threading.Thread(target=lambda n=name, s=stream: (s.result(60), ended.append(n)))
        for name, stream in streams.items()
    ]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert ["person", "old", "new", "batch"] == ended


def test_calls_that_arrive_together_compute_a_shared_prefix_once(start, ask):
    """Tasks share the system-and-tools prefix even when nobody has computed it yet."""
    engine = start(chunk_tokens=32)
    prefix = _prompt(0, 160)
    streams = [engine.submit(ask(prefix + str(i), 3)) for i in range(4)]
    generations = [stream.result(60) for stream in streams]
    assert [0, 160, 160, 160] == sorted(generation.usage.cached_tokens for generation in generations)
    assert engine.stats()["prefill_tokens"] < 2 * 160


def test_the_parts_of_a_calls_time_add_up(start, ask):
    """queue + restore + recompute + prefill + decode is the whole, for calls alone and in a crowd."""
    engine = start(blocks=24)
    streams = [engine.submit(ask(_prompt(i, 200), 20)) for i in range(3)]
    for stream in streams:
        timing = stream.result(60).timing
        parts = timing.queued_s + timing.restore_s + timing.recompute_s + timing.prefill_s + timing.decode_s
        assert parts == pytest.approx(timing.total_s, abs=0.005)
        assert 0 < timing.ttft_s <= timing.total_s
        assert 0 == timing.recompute_s


def test_what_a_session_lost_is_booked_as_recompute(start, ask):
    """Its blocks were dropped: the next turn computes old tokens again, and says so."""
    engine = start()
    first = engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    engine.apply(Move(session=first.session, action=Action.DROP, reason="test"))
    second = engine.submit(ask(_prompt(0, 200) + first.text + "!", 4, task="t")).result(60)
    assert 0 == second.usage.cached_tokens
    assert second.timing.recompute_s > second.timing.prefill_s


def test_salts_keep_tenants_apart(tiny, start, ask):
    """Same prompt, other salt: nothing is shared through the index."""
    engine = start(salt="a")
    other = start(salt="b")
    engine.submit(ask(_prompt(0), 4)).result(60)
    assert engine.submit(ask(_prompt(0), 4)).result(60).usage.cached_tokens > 0
    assert 0 == other.submit(ask(_prompt(0), 4)).result(60).usage.cached_tokens


def test_many_threads_use_one_engine(tiny, start, ask):
    """Submitting, streaming and counting from 8 threads at once: the texts are those of a serial run (E24)."""
    engine = start(blocks=128)
    prompts = [_prompt(i, 40 + 7 * i) for i in range(8)]
    expected = [tiny.greedy(prompt, 8) for prompt in prompts]
    wrong = []

    def work(number):
        for _ in range(5):
            assert engine.count_tokens(ask(prompts[number])) == len(tiny.ids(prompts[number]))
            stream = engine.submit(ask(prompts[number], 8))
            ids = [id_ for chunk in stream for id_ in chunk.token_ids]
            if ids != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


def test_the_prefill_rate_reaches_the_tiers(start, ask):
    """Recompute is weighed with what this machine really does."""
    engine = start()
    before = engine.tiers.prefill_tokens_s
    engine.submit(ask(_prompt(0, 600), 2)).result(60)
    assert engine.stats()["prefill_tokens_s"] == engine.tiers.prefill_tokens_s != before


def test_device_time_is_shared_out_among_the_calls_of_a_step(start, ask):
    """Together the calls have no more device time than the clock on the wall; the longer prompt has the larger share."""
    engine = start(blocks=64)
    began_s = time.monotonic()
    long, short = engine.submit(ask("a" * 400, 4)), engine.submit(ask("b" * 40, 4))
    long.result(30)
    short.result(30)
    took_s = time.monotonic() - began_s
    assert 0 < short.device_s < long.device_s
    assert short.device_s + long.device_s <= took_s


def test_reused_tokens_are_told_by_the_tier_that_they_were_in(start, ask, park, tmp_path):
    """Kept on the device, brought from host, brought from disk; the sum is what was cached."""
    engine = start(blocks=64, disk=tmp_path, disk_memory=8 * 2**20)
    prompt = "a" * 200
    for tier, name in ((None, "device"), (Tier.HOST, "host"), (Tier.DISK, "disk")):
        task = f"in {name}"
        session = engine.submit(ask(name + prompt, 2, task=task)).result(30).session
        if tier is not None:
            park(engine, session, tier)
        again = engine.submit(ask(name + prompt + " more", 2, task=task)).result(30)
        assert name == max(again.cached_by, key=again.cached_by.get)
        assert again.usage.cached_tokens == sum(again.cached_by.values())
