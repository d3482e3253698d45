"""The stream that carries an answer from an engine's thread to a sync or async consumer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from agentkv import log
from agentkv.core.usage import Usage
from agentkv.engine.base import Chunk, Generation
from agentkv.engine.stream import Stream
from agentkv.errors import GenerationCancelled, RequestInvalid


def generation(text: str = "a b") -> Generation:
    return Generation(
        text=text, raw=text, token_ids=(1, 2), finish_reason="stop", usage=Usage(output_tokens=2, calls=1)
    )


def later(fn, after_s: float = 0.02) -> threading.Thread:
    thread = threading.Timer(after_s, fn)
    thread.start()
    return thread


class CountedCancel:
    """An engine's cancel hook that counts."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_sync_iteration_yields_the_chunks_in_order_and_then_ends():
    """A consumer sees what was pushed, in order, then the end; result() still has the whole."""
    stream = Stream()
    stream.push(Chunk(text="a", token_ids=(1,)))
    stream.push(Chunk(text=" b", token_ids=(2,)))
    stream.finish(generation())
    assert ["a", " b"] == [chunk.text for chunk in stream]
    assert "a b" == stream.result().text
    assert [1, 2] == stream.partial


def test_sync_consumer_sees_the_first_chunk_before_the_end():
    """The first chunk is readable while the producer still works."""
    stream = Stream()
    timer = later(lambda: stream.push(Chunk(text="a")))
    assert "a" == next(iter(stream)).text
    assert not stream.ended
    stream.finish(generation())
    timer.join()


async def test_async_consumer_sees_the_first_chunk_before_the_end():
    """The same for a coroutine whose producer is another thread."""
    stream = Stream()
    timer = later(lambda: stream.push(Chunk(text="a")))
    chunks = aiter(stream)
    assert "a" == (await anext(chunks)).text
    assert not stream.ended
    later(lambda: stream.finish(generation())).join()
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)
    assert "a b" == (await stream.aresult()).text
    timer.join()


async def test_async_consumer_loses_no_chunk_of_a_fast_producer():
    """Wake-ups may be fewer than chunks; chunks are all there."""
    stream = Stream()

    def produce() -> None:
        for number in range(2000):
            stream.push(Chunk(text=str(number)))
        stream.finish(generation())

    thread = threading.Thread(target=produce)
    thread.start()
    assert [str(number) for number in range(2000)] == [chunk.text async for chunk in stream]
    thread.join()


def test_failure_reaches_iteration_and_result_after_the_chunks_before_it():
    """What was produced before an error is delivered, then the error, from every door."""
    stream = Stream()
    stream.push(Chunk(text="a"))
    stream.fail(RequestInvalid("broken"))
    chunks = iter(stream)
    assert "a" == next(chunks).text
    with pytest.raises(RequestInvalid, match="broken"):
        next(chunks)
    with pytest.raises(RequestInvalid, match="broken"):
        stream.result()


async def test_failure_reaches_async_consumers():
    """aresult and async iteration raise the call's error."""
    stream = Stream()
    stream.fail(RequestInvalid("broken"))
    with pytest.raises(RequestInvalid):
        await stream.aresult()
    with pytest.raises(RequestInvalid):
        _ = [chunk async for chunk in stream]


def test_result_times_out_and_can_be_asked_again():
    """A timeout leaves the call running."""
    stream = Stream()
    with pytest.raises(TimeoutError, match=r"0.01 s"):
        stream.result(timeout_s=0.01)
    stream.finish(generation())
    assert "a b" == stream.result(timeout_s=0.01).text


def test_cancel_from_another_thread_wakes_a_waiting_consumer():
    """A consumer that waits for a chunk gets GenerationCancelled at once."""
    hook = CountedCancel()
    stream = Stream(on_cancel=hook)
    timer = later(stream.cancel)
    with pytest.raises(GenerationCancelled):
        next(iter(stream))
    timer.join()
    assert 1 == hook.times


class LooksTogether(Stream):
    """Widens the race: a first look at `ended` waits for the other thread's, unless the lock keeps that one out."""

    both_looked: threading.Barrier | None = None

    @property
    def ended(self) -> bool:
        answer = Stream.ended.fget(self)
        if self.both_looked is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.both_looked.wait(timeout=0.1)
        return answer


def test_two_cancels_at_once_tell_the_engine_once():
    """Two threads that both mean to cancel a running call: the engine hears it once."""
    hook = CountedCancel()
    stream = LooksTogether(on_cancel=hook)
    stream.both_looked = threading.Barrier(2)
    threads = [threading.Thread(target=stream.cancel) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == hook.times


def test_cancel_that_loses_the_race_against_the_end_does_not_reach_the_engine():
    """`ended` may turn true between a look and the deed: then the cancel is a no-op."""
    hook = CountedCancel()
    stream = Stream(on_cancel=hook)
    stream.finish(generation())
    assert stream.fail(GenerationCancelled("late")) is False
    stream.cancel()
    assert 0 == hook.times
    assert "a b" == stream.result().text


def test_nothing_is_taken_after_the_end():
    """Pushes, ends and errors after the end are ignored."""
    stream = Stream()
    stream.finish(generation())
    stream.push(Chunk(text="late", token_ids=(9,)))
    stream.finish(generation("other"))
    stream.fail(RequestInvalid("late"))
    assert [] == list(stream)
    assert [] == stream.partial
    assert "a b" == stream.result().text


def test_leaving_the_with_block_cancels_only_what_runs():
    """`with` cancels an unfinished call and leaves a finished one alone."""
    hook = CountedCancel()
    with Stream(on_cancel=hook) as stream:
        pass
    assert stream.ended
    with Stream(on_cancel=hook) as stream:
        stream.finish(generation())
    assert 1 == hook.times


async def test_cancelling_the_task_that_awaits_the_result_cancels_the_call():
    """asyncio's cancel reaches the engine through aresult."""
    hook = CountedCancel()
    task = asyncio.create_task(Stream(on_cancel=hook).aresult())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 1 == hook.times


async def test_cancelling_the_task_that_iterates_cancels_the_call():
    """asyncio's cancel reaches the engine through iteration as well."""
    hook = CountedCancel()
    stream = Stream(on_cancel=hook)

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 1 == hook.times


def test_producer_survives_a_consumer_whose_loop_is_gone():
    """An abandoned coroutine and its closed loop don't hurt the engine's thread."""
    stream = Stream()
    chunks = None

    async def abandon() -> None:
        nonlocal chunks
        chunks = aiter(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(anext(chunks))), 0.01)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    pending = asyncio.all_tasks(loop)
    loop.close()
    stream.push(Chunk(text="a"))
    stream.finish(generation())
    assert "a b" == stream.result(timeout_s=1).text
    for task in pending:
        task._log_destroy_pending = False


def test_end_callbacks_run_before_a_consumer_sees_the_end():
    """The books are written when the caller learns of the end."""
    stream = Stream()
    seen: list[str] = []

    def slow_books(done: Generation | None, error: BaseException | None) -> None:
        time.sleep(0.02)
        seen.append(done.text if done else repr(error))

    stream.on_end(slow_books)
    timer = later(lambda: stream.finish(generation()), after_s=0)
    stream.result()
    assert ["a b"] == seen
    timer.join()
    stream.on_end(slow_books)
    assert ["a b", "a b"] == seen


def test_broken_end_callback_is_counted_and_hurts_nobody():
    """The engine goes on, the consumer gets its answer, the other callbacks run."""
    stream = Stream()
    seen: list[str] = []
    stream.on_end(lambda done, error: 1 / 0)
    stream.on_end(lambda done, error: seen.append("second"))
    before = log.counters["stream_end_callback_failed"]
    stream.finish(generation())
    assert "a b" == stream.result(timeout_s=1).text
    assert ["second"] == seen
    assert before + 1 == log.counters["stream_end_callback_failed"]


def test_partial_tokens_count_pieces_where_an_engine_gives_no_ids():
    """A cancelled remote call is not billed as zero tokens."""
    stream = Stream()
    stream.push(Chunk(text="a"))
    stream.push(Chunk(text="b"))
    assert 2 == stream.partial_tokens
    local = Stream()
    local.push(Chunk(text="a", token_ids=(1, 2, 3)))
    local.push(Chunk(text="held back"))
    assert 3 == local.partial_tokens


def test_a_cancelled_call_is_told_of_when_it_has_left_its_engine():
    """Its reader knows at once; who keeps books, once it is known what it used. Later callbacks are called at once."""
    told = []
    stream = Stream(settles=True)
    stream.on_end(lambda generation, error: told.append((generation, type(error), stream.device_s)))
    stream.settle()  # nothing has ended yet
    stream.push(Chunk(text="a", token_ids=(1,)))
    stream.cancel()
    with pytest.raises(GenerationCancelled):
        stream.result(0)
    stream.on_end(lambda *_: told.append("second"))
    assert (True, [], False) == (stream.ended, told, stream.wait_settled(0.01))
    stream.device_s = 2.0
    stream.finish(generation())  # it came too late
    stream.settle(), stream.settle()
    assert [(None, GenerationCancelled, 2.0), "second"] == told
    assert stream.wait_settled(0)
    stream.on_end(lambda *_: told.append("third"))
    assert "third" == told[-1]


@pytest.mark.parametrize("end", [lambda s: s.finish(generation()), lambda s: s.fail(RequestInvalid("x"))])
def test_a_call_that_ends_by_itself_is_told_of_at_once(end):
    """Before its reader sees the end, whether its engine settles or not."""
    told = []
    stream = Stream(settles=True)
    stream.on_end(lambda *_: told.append(1))
    end(stream)
    stream.settle()
    stream.cancel()
    assert [1] == told
