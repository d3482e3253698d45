"""Users' reports about ends: calls that are cancelled or starve, engines that are closed, forgotten, forked or long-lived.

Memory, pins, threads and files are as before; the next answer is that of a cold run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.errors import Closed, GenerationCancelled
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

MIB = 1 << 20
TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "


def _prompt(number, length=120):
    return (f"{number}: " + TEXT * 10)[:length]


def _idle(engine, within_s=20.0):
    """Wait until no call is left and every block is unpinned; the stats then."""
    end_s = time.monotonic() + within_s
    while True:
        stats = engine.stats()
        device = stats["kv"]["device"]
        if not stats["running"] + stats["loading"] + stats["waiting"] + device["private"] + device["pinned"]:
            return stats
        assert time.monotonic() < end_s, stats
        time.sleep(0.005)


# -- cancelled


def _cancel(stream, dice):
    stream.cancel()


def _leave(stream, dice):
    with stream:
        if dice.random() < 0.5:
            next(iter(stream), None)


def _interrupted(stream, dice):
    with contextlib.suppress(KeyboardInterrupt), stream:
        for number, _chunk in enumerate(stream):
            if number >= 2:
                raise KeyboardInterrupt


def _cancelled_task(stream, dice):
    async def main():
        task = asyncio.create_task(stream.aresult())
        await asyncio.sleep(dice.random() * 0.004)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize(
    ("streams", "count"),
    [(CpuStreams, 80), (AdversarialStreams, 60), pytest.param(CpuStreams, 300, marks=pytest.mark.slow)],
)
def test_cancelled_streams_leave_everything_as_it_was(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, streams, count
):
    """In the queue, in prefill, in a reload from host or disk, in decode; by call, by `with`, by task, by Ctrl-C (E23)."""
    engine = start(blocks=40, host=90, chunk_tokens=16, disk=tmp_path, disk_memory=8 * MIB, streams=streams())
    dice = random.Random(5)
    endless = tuple(tiny.ids("x" * 300))
    parked = {}
    for number in range(3):
        parked[number] = engine.submit(ask(_prompt(number, 200), 2, task=f"p{number}")).result(60).session
        park(engine, parked[number], Tier.DISK if number == 2 else Tier.HOST)
    threads = threading.active_count()
    ended = 0
    while ended < count:
        calls = []
        for _ in range(dice.randrange(1, 7)):
            number = dice.randrange(6)
            prompt = _prompt(number, 200 if number < 3 else dice.randrange(20, 250))
            task = f"p{number}" if number < 3 else f"t{number}"
            calls.append(engine.submit(ask(prompt + " Go on.", None, task=task, forced_ids=endless)))
        time.sleep(dice.choice([0, 0, 0.002, 0.01]))
        for stream in calls:
            dice.choice([_cancel, _cancel, _leave, _interrupted, _cancelled_task])(stream, dice)
            with contextlib.suppress(GenerationCancelled):  # a machine that stood still may have let one end
                stream.result(20)
            ended += 1
        if dice.random() < 0.5:
            to = dice.choice([Tier.HOST, Tier.DISK])
            for session in parked.values():
                engine.apply(Move(session=session, action=Action.DEMOTE, to=to, reason="test"))
                engine.tiers.vacate(session, Tier.DEVICE)
    stats = _idle(engine)
    engine.tiers.quiesce(20)
    engine.tiers.check()
    assert ended + 3 == stats["cancelled"] + stats["completed"]
    assert stats["cancelled"] > 0.8 * ended
    assert stats["kv"]["loads"] > 12
    assert threads == threading.active_count()
    for number in range(6):
        generation = engine.submit(ask(_prompt(number, 200), 8)).result(60)
        assert tiny.greedy(_prompt(number, 200), 8) == list(generation.token_ids)
    for number in range(6):
        engine.finish_task(f"p{number}")
        engine.finish_task(f"t{number}")
    _idle(engine)


# -- starving


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("host", "disk"), [(0, False), (9, False), (12, True), (60, True)])
@pytest.mark.parametrize("streams", [CpuStreams, AdversarialStreams])
def test_four_agents_over_room_for_one_and_a_half_all_finish(  # noqa: PLR0917  fixtures
    tiny, start, ask, tmp_path, host, disk, streams
):
    """Every agent needs two thirds of the pool, reloads are in flight all the time, and nobody waits for ever (E22)."""
    options = {"disk": tmp_path, "disk_memory": 2 * MIB} if disk else {}
    engine = start(blocks=18, host=host, streams=streams(), **options)
    wrong, errors, stop, sessions = [], [], threading.Event(), set()

    def agent(number):
        try:
            text = _prompt(number, 150)
            for turn in range(3):
                generation = engine.submit(ask(text, 8, task=f"a{number}")).result(40)
                sessions.add(generation.session)
                if tiny.greedy(text, 8) != list(generation.token_ids):
                    wrong.append((number, turn))
                text += generation.text + " And?"
        except BaseException as error:
            errors.append(error)

    def plan():
        dice = random.Random(host)
        while not stop.is_set():
            for session in list(sessions):
                action, to = dice.choice(
                    [(Action.WRITE, Tier.HOST), (Action.DEMOTE, Tier.HOST), (Action.PREFETCH, None)]
                )
                engine.apply(Move(session=session, action=action, to=to, reason="test"))
            time.sleep(0.002)

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(4)]
    planner = threading.Thread(target=plan)
    for thread in (*agents, planner):
        thread.start()
    for thread in agents:
        thread.join()
    stop.set()
    planner.join()
    assert [] == errors
    assert [] == wrong
    stats = _idle(engine)
    engine.tiers.quiesce(20)
    assert (host == 60) <= (stats["kv"]["loads"] > 0)


# -- long lives


def _usage():
    gc.collect()
    return psutil.Process().memory_info().rss / MIB, len(list(Path("/proc/self/fd").iterdir()))


def _short_tasks(engine, ask, park, first, count, *, finish):
    for number in range(first, first + count):
        task = f"short-{number}"
        generation = engine.submit(ask(_prompt(number, 40 + number % 60), 2, task=task)).result(60)
        if number % 10 == 0 and finish:
            park(engine, generation.session, Tier.DISK)
        elif number % 10 == 0:
            engine.apply(Move(session=generation.session, action=Action.WRITE, to=Tier.DISK, reason="test"))
        if finish:
            engine.finish_task(task)


def _tasks_stay_flat(engine, ask, park, *, warm, count, most_mib, finish=True):
    _short_tasks(engine, ask, park, 0, warm, finish=finish)
    rss, files = _usage()
    _short_tasks(engine, ask, park, warm, count, finish=finish)
    rss_after, files_after = _usage()
    assert files == files_after
    assert rss_after - rss < most_mib, f"{rss_after - rss:.1f} MiB more after {count} tasks"
    stats = _idle(engine)
    assert (0 if finish else 100) == stats["sessions"] == stats["kv"]["sessions"]
    assert stats["kv"]["bytes"]["write"] > 0


def test_short_tasks_leave_no_memory_and_no_files_behind(start, ask, park, tmp_path):
    """A hundred and twenty tasks after a warm-up of eighty (K22)."""
    engine = start(host=60, disk=tmp_path, disk_memory=4 * MIB)
    _tasks_stay_flat(engine, ask, park, warm=80, count=120, most_mib=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_thousand_short_tasks_leave_no_memory_and_no_files_behind(start, ask, park, tmp_path):
    """The same over five thousand, with a kept store; what is remembered of tasks has its limits (K22)."""
    engine = start(host=60, disk=tmp_path, disk_memory=4 * MIB, persist=True)
    _tasks_stay_flat(engine, ask, park, warm=1000, count=5000, most_mib=8)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_that_never_end_are_forgotten_in_time(start, ask, park, tmp_path, monkeypatch):
    """Eight hundred tasks that nobody finishes: the hundred that were used last are remembered, and no more (K22)."""
    monkeypatch.setattr("agentkv.engine.local.sessions._IDLE_TASKS", 100)
    engine = start(host=60, disk=tmp_path, disk_memory=4 * MIB)
    _tasks_stay_flat(engine, ask, park, warm=300, count=500, most_mib=8, finish=False)


def test_five_engines_one_after_the_other_give_their_memory_back(tiny, ask, tmp_path):
    """Thirty-two MiB of device and host memory each, touched: after six the process is as large as after one (E27)."""
    after = []
    for number in range(6):
        sizes = {"device_memory": 16 * MIB, "host_memory": 16 * MIB, "disk": tmp_path, "disk_memory": 32 * MIB}
        with LocalEngine(tiny.loaded, **sizes) as engine:
            engine.tiers.pool.fill_(1.0)
            generation = engine.submit(ask(_prompt(number, 200), 2)).result(60)
            engine.apply(Move(session=generation.session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
            engine.tiers.quiesce(20)
        with pytest.raises(Closed):
            engine.submit(ask("x", 1))
        engine.close()
        del engine
        after.append(_usage())
    assert after[-1][0] <= 1.05 * after[0][0]
    assert after[0][1] == after[-1][1]


SCRIPT = """
    import sys, time
    from pathlib import Path
    from agentkv.core.residency import Action, Move, Tier
    from agentkv.engine.base import Request
    from agentkv.engine.local.engine import LocalEngine
    from agentkv.engine.local.loader import load_model

    folder, disk, persist = sys.argv[1:]
    model = load_model(folder, device="cpu", dtype="float32")
    size = model.geometry.slot_bytes
    sizes = {"device_memory": 64 * size, "host_memory": 64 * size, "disk_memory": 32 << 20}
    engine = LocalEngine(model, disk=Path(disk), persist=persist == "True", **sizes)
    done = engine.submit(Request(prompt="x" * 200, forced_ids=(70,) * 4)).result(60)
    engine.apply(Move(session=done.session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
    running = engine.submit(Request(prompt="y" * 100, forced_ids=(70,) * 700))
    next(iter(running))
    print(time.time(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("persist", [False, True])
def test_a_script_that_never_closes_its_engine_ends_at_once(tiny, tmp_path, persist):
    """With a call running and blocks on their way to the disk: exit code 0 within 5 s, and no file left over (E27)."""
    disk = tmp_path / "kv"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tiny.folder), str(disk), str(persist)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    ended_s = time.time()
    assert 0 == run.returncode, run.stderr
    assert ended_s - float(run.stdout.split()[-1]) < 5.0
    assert persist == bool(list(disk.rglob("segment-*")))


# -- forks


def _in_a_child(fn, within_s=15.0):
    """What `fn` gives in a forked child: its exit code, or "hung"."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = fn()
        finally:
            os._exit(code)
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("persist", [False, True])
def test_a_forked_child_that_uses_its_parents_engine_hears_so_at_once(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, persist
):
    """A typed error and no hang; closing it there does nothing, and the parent's engine goes on with all its KV (E26)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 * MIB, persist=persist)
    first = engine.submit(ask(_prompt(0, 150), 4, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    files = sorted(path.name for path in tmp_path.rglob("*"))

    def child():
        try:
            engine.submit(ask(_prompt(0, 150), 4, task="t"))
        except Closed as error:
            told = "fork" in str(error)
        else:
            return 1
        engine.apply(Move(session=first.session, action=Action.PREFETCH, to=Tier.DEVICE, reason="test"))
        engine.close()
        return 0 if told else 2

    assert 0 == _in_a_child(child)
    assert files == sorted(path.name for path in tmp_path.rglob("*"))
    again = engine.submit(ask(_prompt(0, 150) + first.text, 8, task="t")).result(60)
    assert tiny.greedy(_prompt(0, 150) + first.text, 8) == list(again.token_ids)
    assert again.restored_blocks >= 9
