"""Several devices over one host arena and one disk, here two pools on one CPU: tasks wake elsewhere with the same tokens."""

from __future__ import annotations

import threading

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local import several
from agentkv.engine.local.several import LocalEngines
from agentkv.errors import ConfigError


def _prompt(start, count):
    return "".join(chr(97 + (start + 7 * i) % 26) for i in range(count))


@pytest.fixture
def both(tiny):
    """Two engines of one family; checked and closed after the test."""
    made = []

    def make(*, blocks=64, host=64, **options):
        sizes = {"device_memory": tiny.block_bytes(blocks), "host_memory": host * tiny.loaded.geometry.slot_bytes}
        made.append(LocalEngines([tiny.loaded, tiny.loaded], **sizes, **options))
        return made[-1]

    yield make
    for engines in made:
        for engine in engines.engines:
            engine.tiers.check()
        engines.close()


def _moved(engines, task):
    """Have the task's next call answered by the other device."""
    home = engines._homes[task]
    other = next(engine for engine in engines.engines if engine is not home)
    assert several._take_over(task, source=home, to=other)
    engines._homes[task] = other
    return other


def _written(engines, session, to=Tier.HOST):
    engines.apply(Move(session=session, action=Action.WRITE, to=to, reason="test"))
    for engine in engines.engines:
        engine.tiers.quiesce(10)


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_a_task_goes_on_on_another_device(tiny, both, ask, tmp_path, to):
    """Its context is restored there from the shared tier, partial block included; the tokens are those of a cold run."""
    engines = both(disk=tmp_path, disk_memory=64 << 20)
    first = engines.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _written(engines, first.session, to)
    other = _moved(engines, "t")
    prompt = _prompt(0, 200) + first.text + " Go on."
    second = engines.submit(ask(prompt, 20, task="t")).result(60)
    assert first.session == second.session == other.last_session(ask("", task="t").caller)
    assert 219 == second.usage.cached_tokens
    assert 14 == other.stats()["kv"]["hits"]["host"] + other.stats()["kv"]["hits"]["disk"]
    assert 0 == other.stats()["restored"]["short"]
    assert tiny.greedy(prompt, 20) == list(second.token_ids)


def test_what_was_not_written_is_computed_again(tiny, both, ask):
    """A task that moves before its blocks were written down costs time, never a token."""
    engines = both()
    first = engines.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _moved(engines, "t")
    prompt = _prompt(0, 200) + first.text + " Go on."
    second = engines.submit(ask(prompt, 20, task="t")).result(60)
    assert 0 == second.usage.cached_tokens
    assert tiny.greedy(prompt, 20) == list(second.token_ids)


def test_tasks_spread_over_idle_devices(both, ask):
    """A new task starts where least is going on."""
    engines = both()
    streams = [engines.submit(ask(_prompt(i, 100), 60, task=f"t{i}")) for i in range(4)]
    for stream in streams:
        stream.result(60)
    assert 2 == len({id(home) for home in engines._homes.values()})


def test_the_stats_tell_the_model_once(both):
    """As a single engine's do: what reads them there finds it here."""
    engines = both()
    stats = engines.stats()
    assert engines.engines[0].stats()["model"] == stats["model"]
    assert "suggested_sampling" in stats["model"]


def test_a_task_leaves_a_crowded_device(tiny, both, ask):
    """Several calls at home and nobody next door: its next call is answered there, from the shared host."""
    engines = both(blocks=256, host=256)
    first = engines.submit(ask(_prompt(0, 200), 20, task="t")).result(60)
    _written(engines, first.session)
    home = engines._homes["t"]
    engines._homes.update({f"busy{i}": home for i in range(several.CROWD)})
    busy = [engines.submit(ask(_prompt(i, 60), 400, task=f"busy{i}")) for i in range(several.CROWD)]
    prompt = _prompt(0, 200) + first.text + " Go on."
    second = engines.submit(ask(prompt, 20, task="t")).result(60)
    assert engines._homes["t"] is not home
    assert 1 == engines.stats()["moved_tasks"]
    assert 219 == second.usage.cached_tokens
    assert tiny.greedy(prompt, 20) == list(second.token_ids)
    for stream in busy:
        stream.cancel()


def test_a_task_with_a_call_under_way_stays(both, ask):
    """Its sessions are in use at home."""
    engines = both()
    stream = engines.submit(ask(_prompt(0, 60), 400, task="t"))
    home = engines._homes["t"]
    other = next(engine for engine in engines.engines if engine is not home)
    assert not several._take_over("t", source=home, to=other)
    stream.cancel()


def test_moves_and_questions_find_the_device_that_has_the_session(both, ask):
    """Residency, moves and expectations are about sessions, wherever they are."""
    engines = both()
    sessions = [engines.submit(ask(_prompt(i, 100), 4, task=f"t{i}")).result(60).session for i in range(3)]
    for session in sessions:
        assert engines.residency(session).device_blocks > 0
        _written(engines, session)
        assert 0 == engines.residency(session).unwritten_blocks
        engines.expect(session, 1e9)
    assert engines.residency("nobody") is None
    for i in range(3):
        engines.finish_task(f"t{i}")
    assert all(engines.residency(session) is None for session in sessions)


def test_sessions_of_both_devices_are_there_tomorrow(tiny, both, ask, tmp_path):
    """One store for all: what either device had resumes."""
    engines = both(disk=tmp_path, disk_memory=64 << 20, persist=True)
    texts = {}
    streams = {f"t{i}": engines.submit(ask(_prompt(i, 150), 20, task=f"t{i}")) for i in range(4)}
    for task, stream in streams.items():
        texts[task] = stream.result(60).text
    assert 2 == len({id(home) for home in engines._homes.values()})
    engines.close()
    engines = both(disk=tmp_path, disk_memory=64 << 20, persist=True)
    for i in range(4):
        prompt = _prompt(i, 150) + texts[f"t{i}"] + "!"
        answer = engines.submit(ask(prompt, 8, task=f"t{i}")).result(60)
        assert answer.usage.cached_tokens >= 150
        assert tiny.greedy(prompt, 8) == list(answer.token_ids)


def test_many_agents_on_two_devices_write_the_same_tokens(tiny, both, ask, tmp_path):
    """Threads, pressure, moves and changes of device: every answer is the cold one's."""
    engines = both(blocks=40, host=60, disk=tmp_path, disk_memory=16 << 20)
    wrong = []

    def agent(number):
        prompt = _prompt(number, 80)
        for turn in range(4):
            answer = engines.submit(ask(prompt, 8, task=f"a{number}")).result(120)
            if tiny.greedy(prompt, 8) != list(answer.token_ids):
                wrong.append((number, turn))
            came = threading.Event()
            move = Move(session=answer.session, action=Action.DEMOTE, to=Tier(1 + turn % 2), reason="test")
            engines.apply(move, lambda _receipt, came=came: came.set())
            if (number + turn) % 2:  # else it moves while its blocks are being written
                came.wait(10)
            with engines._lock:
                home = engines._homes[f"a{number}"]
                other = next(engine for engine in engines.engines if engine is not home)
                if several._take_over(f"a{number}", source=home, to=other):
                    engines._homes[f"a{number}"] = other
            prompt += answer.text + " More."

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert [] == wrong
    hits = [engine.stats()["kv"]["hits"] for engine in engines.engines]
    assert sum(one["host"] + one["disk"] for one in hits) > 0


def test_different_models_are_refused(tiny, save_tiny, tmp_path):
    """Blocks of one mean nothing to the other."""
    from agentkv.engine.local.loader import load_model

    other = load_model(str(save_tiny(tmp_path, seed=5)), device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="same model"):
        LocalEngines([tiny.loaded, other], device_memory=1 << 24, host_memory=1 << 24)
