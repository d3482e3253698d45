"""Sessions that outlive their process: found again by the next engine with the same model, salt and disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from agentkv.core.message import Message
from agentkv.core.residency import Action, Move, Tier
from agentkv.errors import ConfigError

DISK = 64 << 20


@pytest.fixture
def lasting(start, tmp_path):
    """Engines whose sessions are kept in one folder."""
    return lambda **options: start(disk=tmp_path / "kv", disk_memory=DISK, persist=True, **options)


def _prompt(start, count):
    return "".join(chr(97 + (start + 7 * i) % 26) for i in range(count))


def test_a_session_of_yesterday_resumes_today(tiny, lasting, ask):
    """The next engine reads the context from disk, computes only what is new, and writes the same tokens (K11)."""
    engine = lasting()
    first = engine.submit(ask(_prompt(0, 200), 20, task="thread-7")).result(60)
    engine.close()
    engine = lasting()
    prompt = _prompt(0, 200) + first.text + " Go on."
    second = engine.submit(ask(prompt, 20, task="thread-7")).result(60)
    assert first.session == second.session
    assert 219 == second.usage.cached_tokens
    assert 14 == engine.stats()["kv"]["hits"]["disk"]
    assert tiny.greedy(prompt, 20) == list(second.token_ids)


def test_the_clients_own_words_find_it_too(tiny, lasting, ask):
    """A new task with the same beginning uses the full blocks of a kept session."""
    engine = lasting()
    engine.submit(ask(_prompt(0, 200), 4, task="a")).result(60)
    engine.close()
    engine = lasting()
    other = engine.submit(ask(_prompt(0, 200), 4, task="b")).result(60)
    assert 192 == other.usage.cached_tokens


def test_chat_turns_with_tool_calls_keep_their_bytes(lasting, ask):
    """What the model really wrote in a turn with tool calls is remembered over the restart (K19)."""
    from agentkv.core.task import Caller
    from agentkv.engine.base import Request, Sampling

    def chat(*turns, forced=None):
        return Request(
            messages=turns, caller=Caller(task="t"), sampling=Sampling(max_tokens=120), forced_ids=forced, tools=()
        )

    engine = lasting(blocks=64)
    question = Message(role="user", content="Look.")
    first = engine.submit(chat(question)).result(60)
    engine.close()
    engine = lasting(blocks=64)
    answer = Message(role="assistant", content=first.text, tool_calls=first.tool_calls)
    second = engine.submit(chat(question, answer, Message(role="user", content="More."))).result(60)
    assert first.session == second.session
    assert second.usage.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2


@pytest.mark.parametrize("change", ["salt", "weights"])
def test_another_tenant_or_another_model_gets_nothing(  # noqa: PLR0917  fixtures
    tiny, start, ask, tmp_path, save_tiny, change
):
    """Sessions are kept per model content and salt; the control with neither changed reuses (K2, K3, K5)."""
    from agentkv.engine.local.loader import load_model

    folder = tmp_path / "kv"
    engine = start(disk=folder, disk_memory=DISK, persist=True, salt="a")
    engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    engine.close()
    options = {"disk": folder, "disk_memory": DISK, "persist": True, "salt": "a"}
    if change == "salt":
        other = start(**{**options, "salt": "b"})
    else:
        from tests.engine.local.conftest import Tiny

        changed = Tiny.__new__(Tiny)
        changed.loaded = load_model(str(save_tiny(tmp_path / "m", seed=1)), device="cpu", dtype="float32")
        other = start(model=changed, **options)
    assert 0 == other.submit(ask(_prompt(0, 200), 4, task="t")).result(60).usage.cached_tokens
    assert 0 == other.stats()["kv"]["disk"]["kept_blocks"]
    other.close()
    same = start(**options)
    assert 0 < same.submit(ask(_prompt(0, 200), 4, task="t")).result(60).usage.cached_tokens


def test_a_finished_task_leaves_nothing(lasting, ask):
    """What is over is over in the store as well."""
    engine = lasting()
    engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    session = engine.last_session(ask("", task="t").caller)
    engine.apply(Move(session=session, action=Action.WRITE, to=Tier.DISK, reason="test"))
    engine.tiers.quiesce(10)
    assert engine.tiers._keep.flush(10)
    assert 1 == engine.stats()["kv"]["disk"]["notes"]
    engine.finish_task("t")
    assert engine.tiers._keep.flush(10)
    assert 0 == engine.stats()["kv"]["disk"]["notes"]
    engine.close()
    engine = lasting()
    assert 0 == engine.stats()["sessions"]
    assert 0 == engine.stats()["kv"]["disk"]["used"]


def test_a_bit_that_flipped_overnight_is_computed_again(tiny, lasting, ask, tmp_path):
    """Blocks of an earlier process are always verified (K6)."""
    engine = lasting()
    first = engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    geometry = engine.tiers.geometry
    engine.close()
    (segment,) = (tmp_path / "kv").rglob("segment-*")
    with segment.open("r+b") as file:
        file.seek(5 * geometry.slot_bytes + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    engine = lasting()
    prompt = _prompt(0, 200) + first.text + "?"
    second = engine.submit(ask(prompt, 12, task="t")).result(60)
    assert tiny.greedy(prompt, 12) == list(second.token_ids)
    assert 1 == engine.stats()["kv"]["checksum_failures"]
    assert 1 == engine.stats()["restored"]["short"]
    assert 0 < second.usage.cached_tokens < 192


def test_a_second_engine_on_the_same_store_works_without_keeping(lasting, ask):
    """One process at a time has the store; another one says why its sessions are not kept (K17)."""
    first = lasting()
    second = lasting()
    assert first.stats()["kv"]["disk"]["lasting"]
    assert "" != second.stats()["kv"]["disk"]["not_lasting"]
    second.submit(ask(_prompt(0, 60), 4)).result(60)


def test_a_new_session_never_takes_a_kept_ones_name(lasting, ask):
    """Numbering goes on where the earlier process stopped."""
    engine = lasting()
    kept = engine.submit(ask(_prompt(0, 100), 4, task="t")).result(60).session
    engine.close()
    engine = lasting()
    assert kept != engine.submit(ask("Something else", 4, task="t")).result(60).session


def test_persist_without_a_disk_is_refused(start):
    """There is nowhere to keep anything."""
    with pytest.raises(ConfigError, match="disk"):
        start(persist=True)


def test_closing_over_a_disk_that_hangs_waits_for_one_deadline_only(lasting, ask, monkeypatch):
    """What could not be saved is lost; nobody is held up for the whole time that saving may take."""
    engine = lasting()
    engine.submit(ask(_prompt(0, 200), 4, task="t")).result(60)
    go = threading.Event()
    monkeypatch.setattr(engine.tiers._slab, "write", lambda _images, **_options: go.wait(60))
    engine.tiers._carrier._io_deadline_s = 0.3
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < 10
    go.set()


CHILD = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model

loaded = load_model(sys.argv[1], device="cpu", dtype="float32")
block = loaded.geometry.block_bytes
engine = LocalEngine(loaded, device_memory=64 * block, host_memory=64 * loaded.geometry.slot_bytes,
                     disk=Path(sys.argv[2]), disk_memory=64 << 20, persist=True)
print("ready", engine.stats()["kv"]["disk"]["kept_blocks"], flush=True)
for number in range(10_000):
    task = f"task-{number % 5}"
    text = "".join(chr(97 + (number % 5 + 7 * i) % 26) for i in range(60 + 3 * (number // 5 % 40)))
    session = engine.submit(Request(prompt=text, caller=Caller(task=task), sampling=Sampling(max_tokens=3))).result(60).session
    engine.apply(Move(session=session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
    print(number, flush=True)
"""


def _killed(folder, disk, after_lines):
    """A process that uses the store until it is killed without warning."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), str(disk)], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(after_lines + 1):
            assert child.stdout.readline()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_killed_at_random_points_leave_right_bytes_or_misses(tiny, start, ask, tmp_path):
    """A dozen kills in the middle of writes and notes: the next engine's tokens are those of a cold one."""
    kept = 0
    for kill in range(12):
        _killed(tiny.folder, tmp_path / "kv", 3 + 5 * kill % 23)
        engine = start(disk=tmp_path / "kv", disk_memory=DISK, persist=True)
        kept += engine.stats()["kv"]["disk"]["kept_blocks"]
        for task in range(5):
            prompt = "".join(chr(97 + (task + 7 * i) % 26) for i in range(90))
            generation = engine.submit(ask(prompt, 4, task=f"task-{task}")).result(60)
            assert tiny.greedy(prompt, 4) == list(generation.token_ids)
        assert 0 == engine.stats()["kv"]["checksum_failures"]
        engine.tiers.check()
        engine.close()
    assert kept > 12


def test_a_note_says_what_a_session_is(lasting, ask, tmp_path):
    """What the command line lists comes from the note."""
    engine = lasting()
    engine.submit(ask(_prompt(0, 200), 20, task="thread-7")).result(60)
    assert engine.tiers.save(10)
    (note,) = [json.loads(payload) for payload in engine.tiers._slab.notes.values()]
    assert ("thread-7", 219, 14) == (note["task"], note["tokens"], len(note["keys"]))
    assert note["bytes"] == 14 * engine.tiers.geometry.block_bytes
    assert note["model"] == engine.model
