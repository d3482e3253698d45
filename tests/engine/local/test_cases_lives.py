"""Users' reports about cancelled calls, threads and starving, with guesses, grammars and several choices in play (E22 to E24)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time

import psutil
import pytest
from agentkv_langgraph import ChatAgentKV, LangGraphHost

from agentkv import AgentKV
from agentkv.core.message import Message, ToolSpec
from agentkv.core.rates import Prefill
from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, ToolChoice
from agentkv.errors import AgentKVError, GenerationCancelled
from agentkv.policy import OURS, make_rules
from agentkv.sim.costs import Costs
from agentkv.sim.simulator import Simulator
from agentkv.sim.workload import Session, Turn, Workload

MIB = 1 << 20
FEW = tuple((ord(letter) - 33, 60.0) for letter in "abc")
LOG = "FAILED test_a - got 1\nFAILED test_b - got 2\nFAILED test_c - got 3\nFAILED test_d - "
OPEN_ENDED = {"type": "array", "items": {"type": "string"}, "minItems": 40}
TOOL = ToolSpec(
    name="put",
    strict=True,
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)


def _idle(engine, within_s=20.0):
    end_s = time.monotonic() + within_s
    while True:
        stats = engine.stats()
        device = stats["kv"]["device"]
        if not stats["running"] + stats["loading"] + stats["waiting"] + device["private"] + device["pinned"]:
            return stats
        assert time.monotonic() < end_s, stats
        time.sleep(0.005)


# -- E23


def _request(dice, task):
    """A call that will not end soon: guessed ahead, held to a grammar, forced to call, or with several choices."""
    length, warm = dice.randrange(2, 12), dice.choice([0.0, 1.0])
    text = f"{dice.randrange(3)} {LOG}" * 2
    sampling = Sampling(max_tokens=300, temperature=warm, logit_bias=FEW)
    kind = dice.randrange(5)
    more = [
        {}, {"response_format": ResponseFormat(schema=OPEN_ENDED)}, {"n": dice.randrange(2, 5)},
        {"tools": (TOOL,), "tool_choice": ToolChoice(mode="required")}, {"n": 2, "logprobs": 3, "response_format": ResponseFormat()},
    ][kind]  # fmt: skip
    turns = (Message(role="user", content=text[: 20 * length]),)
    return Request(messages=turns, sampling=sampling, caller=Caller(task=task), **more)


def _cancel(stream, dice):
    stream.cancel()


def _leave(stream, dice):
    with stream:
        for _chunk in zip(range(dice.randrange(4)), stream, strict=False):
            pass


def _interrupt(stream, dice):
    with contextlib.suppress(KeyboardInterrupt), stream:
        for number, _chunk in enumerate(stream):
            if number >= dice.randrange(4):
                raise KeyboardInterrupt


def _drop_task(stream, dice):
    async def main():
        task = asyncio.create_task(stream.aresult())
        await asyncio.sleep(dice.random() * 0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_calls_of_every_kind_can_be_cancelled_at_any_point(start, ask, tmp_path, tiny, count):
    """Guessing ahead, held to a grammar, with several choices, over tiers that move: all is free again, answers are right."""
    engine = start(blocks=60, host=90, chunk_tokens=16, disk=tmp_path, disk_memory=8 * MIB)
    engine.submit(_request(random.Random(2), "warm-up")).cancel()  # reads the vocabulary once
    _idle(engine)
    threads, files = threading.active_count(), psutil.Process().num_fds()
    dice, ended = random.Random(7), 0
    while ended < count:
        calls = [engine.submit(_request(dice, f"t{dice.randrange(5)}")) for _ in range(dice.randrange(1, 5))]
        time.sleep(dice.choice([0, 0.002, 0.02, 0.05]))
        for stream in calls:
            dice.choice([_cancel, _leave, _interrupt, _drop_task])(stream, dice)
            with contextlib.suppress(GenerationCancelled):  # some end before
                stream.result(20)
            ended += 1
        for number in range(5):
            session = engine.last_session(Caller(task=f"t{number}"))
            if session and dice.random() < 0.4:
                action = dice.choice([Action.DEMOTE, Action.WRITE])
                engine.apply(Move(session=session, action=action, to=Tier.HOST, reason="test"))
    stats = _idle(engine)
    engine.tiers.quiesce(20)
    engine.tiers.check()
    assert stats["drafted_tokens"] > count / 10
    assert (threads, files) == (threading.active_count(), psutil.Process().num_fds())
    for number in range(3):
        prompt = f"{number} {LOG}"
        told = engine.submit(ask(prompt, 16)).result(60)
        assert tiny.greedy(prompt, 16) == list(told.token_ids)
    held = engine.submit(
        Request(
            prompt="x", response_format=ResponseFormat(schema={"enum": ["right"]}), sampling=Sampling(max_tokens=20)
        )
    ).result(60)
    assert "right" == json.loads(held.text)
    for number in range(5):
        engine.finish_task(f"t{number}")
    _idle(engine)


def test_what_was_written_before_a_cancel_is_billed_for_every_choice(start):
    """The stream knows the ids of all choices, those of a step's guesses too."""
    engine = start()
    with AgentKV.with_engine(engine) as kv:
        with kv.task("job", final=False):
            request = Request(
                messages=(Message(role="user", content=LOG),), n=3, sampling=Sampling(max_tokens=400, logit_bias=FEW)
            )
            with kv.submit(request) as stream:
                seen = [chunk for _, chunk in zip(range(150), stream, strict=False)]
        usage = kv.report("job").usage
        assert engine.stats()["output_tokens"] == usage.output_tokens >= len(stream.partial)
        assert usage.output_tokens >= sum(len(chunk.token_ids) for chunk in seen) > 0


def test_choices_of_one_request_run_together_however_full_it_is(start, ask):
    """A crowd that has just answered fills the memory; the second and third choice do not wait for the first one's end."""
    engine = start(blocks=80, host=40)
    for number in range(12):
        engine.submit(ask(f"{number} {LOG}" * 2, 2)).result(60)
    before = engine.stats()["steps"]
    request = Request(
        messages=(Message(role="user", content="Go."),),
        n=3,
        sampling=Sampling(max_tokens=40, temperature=1.0, logit_bias=((257, -100.0),)),
    )
    told = engine.submit(request).result(60)
    assert [40] * 3 == [len(choice.token_ids) for choice in told.choices]
    assert engine.stats()["steps"] - before < 60


# -- E24


@pytest.mark.parametrize("calls", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_sixteen_threads_share_one_model(start, calls):
    """invoke, stream and counting at once: no error, and every text is that of a serial run."""
    engine = start(blocks=256)
    with AgentKV.with_engine(engine, host=LangGraphHost(), ledger=None) as kv:
        model = ChatAgentKV(kv, max_tokens=4)
        prompts = [f"Question {number}: " + "é漢 " * number for number in range(8)]
        with kv.task("serial"):
            wanted = [model.invoke(prompt).text for prompt in prompts]
            counted = [model.get_num_tokens(prompt) for prompt in prompts]
        errors = []

        def work(number):
            dice = random.Random(number)
            try:
                with kv.task(f"thread-{number}"):
                    for _ in range(calls):
                        which, way = dice.randrange(8), dice.randrange(3)
                        if way == 0:
                            assert wanted[which] == model.invoke(prompts[which]).text
                        elif way == 1:
                            assert wanted[which] == "".join(chunk.text for chunk in model.stream(prompts[which]))
                        else:
                            assert counted[which] == model.get_num_tokens(prompts[which])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == errors


# -- E22


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "held", [{"n": 3}, {"response_format": ResponseFormat(schema=OPEN_ENDED)}, {}], ids=["n", "json", "text"]
)
def test_four_agents_with_guesses_finish_over_room_for_one_and_a_half(start, held):
    """Guesses and choices take no room that somebody needs: everybody finishes, or hears why not."""
    engine = start(blocks=18, host=40)
    streams = [
        engine.submit(
            Request(
                messages=(Message(role="user", content=f"{number} {LOG}"),),
                caller=Caller(task=f"a{number}"),
                sampling=Sampling(max_tokens=60, logit_bias=FEW),
                **held,
            )
        )
        for number in range(4)
    ]
    for stream in streams:
        with contextlib.suppress(AgentKVError):
            assert stream.result(40).token_ids
    _idle(engine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("host_bytes", [0, 300_000, 4_000_000])
def test_the_simulator_ends_where_the_engine_does(name, host_bytes):
    """The same room for one and a half calls, four agents, ten turns each: all end, in events that can be counted."""
    turns = tuple(
        Turn(prompt_tokens=560, output_tokens=16, reuse_tokens=0 if not number else 544, wait_s=0.5, tool="pytest")
        for number in range(9)
    )
    last = Turn(prompt_tokens=560, output_tokens=16, reuse_tokens=544, wait_s=None, tool="pytest")
    load = Workload(sessions=tuple(Session(name=f"s{i}", turns=(*turns, last)) for i in range(4)), agents=4)
    costs = Costs(
        token_bytes=1000, prefill=Prefill(linear_s=1e-3, quadratic_s=1e-8, constant_s=0.0), decode_base_s=0.01,
        decode_per_token_s=0.0, h2d_bytes_s=1e6, d2h_bytes_s=1e6, device_bytes=864_000, host_bytes=host_bytes, token_budget=512,
    )  # fmt: skip
    result = Simulator(load, costs, make_rules(name), shared_tokens=0, checked=True).run()
    assert (4, 40) == (result.sessions, result.turns)
