"""AgentKV on the embedded engine with real weights: tiers act, trouble is survived, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentkv import AgentKV, Budget, Message, Request, Sampling
from agentkv.core.residency import Action, Receipt, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.errors import PromptTooLong
from agentkv.policy import ladder
from agentkv.units import MIB

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]

LADDER = ladder(keep_s=0.05, host_s=5.0, drop_tokens=64, margin_s=0.05)
WORDS = "The log says that the third assertion failed because the total was rounded twice. "


def ask(text: str, *, max_tokens: int = 4) -> Request:
    return Request(messages=(Message(role="user", content=text),), sampling=Sampling(max_tokens=max_tokens))


def follow_up(request: Request, answer: str, text: str) -> Request:
    history = (*request.messages, Message(role="assistant", content=answer), Message(role="user", content=text))
    return Request(messages=history, sampling=request.sampling)


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture
def kv(model, tmp_path: Path):
    engine = LocalEngine(
        model, device_memory=48 * MIB, host_memory=192 * MIB, disk=tmp_path / "disk", disk_memory=128 * MIB
    )
    with AgentKV.with_engine(engine, policy=LADDER) as made:
        yield made


def wait_for(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def _all_in(kv: AgentKV, session: str, tier: Tier) -> bool:
    where = kv.engine.residency(session)
    return where.total_blocks == (where.disk_blocks if tier is Tier.DISK else where.host_blocks)


def test_a_tool_call_sends_the_context_down_and_the_answer_is_the_same(kv):
    """The blocks really move to host and disk and back, and the next answer equals one that never left."""
    first = ask(WORDS * 12)

    def run(task: str, expect_s: float | None) -> str:
        with kv.task(task):
            answer = kv.submit(first).result(60)
            if expect_s is not None:
                deep = expect_s > 5
                with kv.tool(task, expect_s=expect_s):
                    wait_for(lambda: _all_in(kv, answer.session, Tier.DISK if deep else Tier.HOST))
                    for tier in (Tier.DEVICE, Tier.HOST) if deep else (Tier.DEVICE,):
                        kv.engine.tiers.vacate(answer.session, tier)
            again = kv.submit(follow_up(first, answer.text, "And then?")).result(60)
            assert again.usage.cached_tokens >= answer.usage.input_tokens - 32
            return again.text

    kept = run("kept", None)
    before = dict(kv.stats()["engine"]["kv"]["hits"])
    assert kept == run("host", 2.0)
    from_host = kv.stats()["engine"]["kv"]["hits"]["host"] - before["host"]
    assert kept == run("disk", 60.0)
    from_disk = kv.stats()["engine"]["kv"]["hits"]["disk"] - before["disk"]
    assert min(from_host, from_disk) >= 10


def test_a_final_task_is_destroyed_without_a_byte_written(kv):
    """The end of `with kv.task()` frees its blocks in every tier, but for its template, and writes nothing."""
    with kv.task("short"):
        kv.submit(ask(WORDS * 8)).result(60)
        written = kv.stats()["engine"]["kv"]["bytes"]["d2h"]
    stats = kv.stats()["engine"]["kv"]
    assert written == stats["bytes"]["d2h"]
    assert stats["template_blocks"] == stats["device"]["used"] < 5
    kv.engine.tiers.check()


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(kv):
    """Longer than the pool, longer than the context: nothing half done, and others go on."""
    with kv.task("long", final=False), pytest.raises(PromptTooLong) as caught:
        kv.submit(ask(WORDS * 400))
    assert caught.value.needed_tokens > caught.value.limit_tokens
    assert str(caught.value.limit_tokens) in str(caught.value).replace(",", "")
    assert 0 == kv.report("long").usage.calls
    assert kv.submit(ask("Hello")).result(60).text


def test_more_tasks_than_memory_all_finish(kv):
    """A pool of one context and a half, four agents that each fill one, tools between turns: no deadlock."""
    done: list[str] = []

    def agent(name: str) -> None:
        with kv.task(name):
            request = ask(f"{name}. " + WORDS * 14)
            for _ in range(2):
                answer = kv.submit(request).result(120)
                with kv.tool("sleep", expect_s=1.0):
                    time.sleep(0.1)
                request = follow_up(request, answer.text, "Go on.")
        done.append(name)

    threads = [threading.Thread(target=agent, args=(f"agent-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert ["agent-0", "agent-1", "agent-2", "agent-3"] == sorted(done)
    kv.engine.tiers.quiesce(10)
    kv.engine.tiers.check()
    stats = kv.stats()["engine"]["kv"]
    assert stats["template_blocks"] >= stats["device"]["used"]


def test_a_disk_folder_that_cannot_be_used_only_costs_the_disk_tier(tmp_path):
    """A path below a regular file: the engine answers, and stats say why there is no disk."""
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with AgentKV.local(device_memory="16MiB", host_memory="16MiB", disk=blocker / "disk", ledger="memory") as kv:
        assert kv.submit(ask("Hello")).result(60).token_ids
        assert "file" in kv.stats()["engine"]["disk_off"]


VICTIM = """
import sys, time
from agentkv import AgentKV, Budget, Message, Request, Sampling
from agentkv.core.residency import Action, Move, Tier
kv = AgentKV.local(device_memory="16MiB", host_memory="16MiB", disk=sys.argv[1], disk_memory="64MiB", ledger="memory")
with kv.task("t", final=False):
    text = "a long story about a log file " * 20
    answer = kv.submit(Request(messages=(Message(role="user", content=text),), sampling=Sampling(max_tokens=2))).result()
kv.engine.apply(Move(session=answer.session, action=Action.DEMOTE, to=Tier.DISK, reason="test"))
kv.engine.tiers.quiesce(30)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_is_swept_at_the_next_start(tmp_path):
    """kill -9 leaves a directory and a lock; the next start removes both and works."""
    disk = tmp_path / "disk"
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(disk)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert victim.stdout is not None
    assert "ready\n" == victim.stdout.readline()
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    victim.stdout.close()
    left = {path.name for path in disk.iterdir()}
    assert left
    with AgentKV.local(
        device_memory="16MiB", host_memory="16MiB", disk=disk, disk_memory="64MiB", ledger="memory"
    ) as kv:
        assert not left & {path.name for path in disk.iterdir()}
        assert kv.submit(ask("Hello")).result(60).token_ids
    assert [] == list(disk.iterdir())


def test_the_openai_client_in_process_bills_the_task(kv):
    """`kv.openai()` needs no socket, and its calls land on the caller's bill."""
    with kv.task("client", final=False):
        reply = kv.openai().chat.completions.create(
            model=kv.engine.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=4, temperature=0
        )
    assert reply.usage is not None
    bill = kv.report("client")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        bill.usage.input_tokens,
        bill.usage.output_tokens,
    )


def test_a_demotion_is_reported_with_its_bytes_and_times(kv):
    """The receipt says when the copy was submitted, when its first byte moved, when it ended."""
    receipts: list[Receipt] = []
    kv.on_receipt(receipts.append)
    with kv.task("t"):
        kv.submit(ask(WORDS * 8)).result(60)
        started_s = time.monotonic()
        with kv.tool("pytest", expect_s=2.0):
            wait_for(lambda: receipts)
    receipt = receipts[0]
    assert (Action.DEMOTE, Tier.HOST) == (receipt.move.action, receipt.move.to)
    assert receipt.size_bytes == receipt.blocks * kv.engine.tiers.geometry.block_bytes > 0
    assert started_s <= receipt.submitted_s <= receipt.first_byte_s <= receipt.finished_s


def test_a_prompt_is_tokenised_once_for_the_budget_and_the_call(kv, monkeypatch):
    """Counting for the reservation and submitting share the work."""
    rendered = []
    render = kv.engine._intake._chat.render
    monkeypatch.setattr(
        kv.engine._intake._chat, "render", lambda *args, **kwargs: rendered.append(1) or render(*args, **kwargs)
    )
    with kv.task("t", budget=Budget(tokens=5000)):
        kv.submit(ask(WORDS * 4)).result(60)
    assert [1] == rendered


def test_a_budget_larger_than_the_memory_does_not_ask_for_more_than_the_memory(kv):
    """Without max_tokens the reservation ends at what the device memory can hold, so the call is answered."""
    with kv.task("t", budget=Budget(tokens=1_000_000), final=False):
        stream = kv.submit(Request(messages=(Message(role="user", content="Hello"),)))
        stream.cancel()
    assert 1 == kv.report("t").usage.calls


def test_two_devices_are_one_engine_to_the_caller(tmp_path):
    """Tasks, tools, bills and stats work as with one; both pools are used."""
    options = {"device_memory": "32MiB", "host_memory": "64MiB", "disk": tmp_path / "kv", "disk_memory": "128MiB"}
    with AgentKV.local("smollm2-135m", device="cpu,cpu", ledger="memory", **options) as kv:
        for task in ("a", "b"):
            with kv.task(task, final=False):
                first = ask(WORDS * 6)
                answer = kv.submit(first).result(60)
                with kv.tool("sleep", expect_s=0.01):
                    pass
                again = kv.submit(follow_up(first, answer.text, "And then?")).result(60)
                assert again.usage.cached_tokens >= answer.usage.input_tokens - 16
        devices = kv.stats()["engine"]["devices"]
        assert 2 == len(devices)
        assert 4 == kv.stats()["engine"]["completed"]
        assert 2 == kv.report("a").usage.calls
