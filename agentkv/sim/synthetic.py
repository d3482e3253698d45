"""Made-up traces with the published marginals of coding agents, and an open-loop stream of chat requests.

The same seed gives the same trace on every machine. The figures are `mix.py`'s; what the marginals should be and how
far off they are is in docs/traces.md and in the tests. What is made up is the order of tools: it says nothing.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence

from agentkv.errors import ConfigError
from agentkv.sim.mix import COMMANDS, FIRST, HUMAN, OUTPUT, RESULT, STEPS, Command
from agentkv.sim.trace import Skips, Trace, Wait

BLOCK_TOKENS = 64
"""Reuse is counted in whole blocks, as in the recordings."""

HUMAN_SHARE = 0.134
PARALLEL_SHARE = 0.12
SMALL_WINDOW, LARGE_WINDOW, LARGE_SHARE = 165_000, 500_000, 0.04
"""Contexts at which sessions are compacted, and how many that begin small have the larger one."""

BREAK_SHARE = 0.012
"""Calls whose prompt shares only its beginning with the one before (an early edit, a changed tool list)."""

SESSION_PART, COMMAND_PART = 0.25, 0.40
"""Parts of the variance of a command's log duration that lie between sessions, and between a session's own commands;
the rest, 0.35, is from call to call. Measured on real commands: 1 - (0.41 / 0.69)^2 is not from call to call."""

_DECIMALS = 4
_SHORTEST_S = 1e-4


def synthetic(
    *,
    seed: int = 0,
    sessions: int = 200,
    tools: bool = True,
    humans: bool = True,
    arrivals_per_s: float | None = None,
    steps: int | None = None,
) -> Trace:
    """Sessions of coding agents with tool names, commands, time-outs, parallel calls, people, and compactions.

    `tools` or `humans` False: without those waits. `arrivals_per_s`: sessions arrive as a Poisson process (open loop).
    `steps`: that many waits in each session instead of a published distribution. Raises ConfigError on what cannot be.
    """
    if sessions < 0 or (steps is not None and steps < 1) or not (tools or humans):
        raise ConfigError(f"sessions={sessions}, steps={steps}, tools={tools}, humans={humans} describes no trace")
    made = tuple(
        _session(random.Random(f"{seed}/{index}"), f"s{index:05d}", tools=tools, humans=humans, steps=steps)  # noqa: S311 - not for secrets
        for index in range(sessions)
    )
    count = sum(len(wait.calls) or 1 for session in made for wait in session)
    return Trace(
        sessions=made,
        skipped=Skips(records=count, used=count),
        source=f"synthetic, seed {seed}",
        arrivals_s=_poisson(random.Random(f"{seed}/arrivals"), sessions, arrivals_per_s),  # noqa: S311
    )


def requests(
    *,
    seed: int = 0,
    sessions: int = 1000,
    arrivals_per_s: float = 1.0,
    prompt_tokens: int = 12_000,
    output_tokens: int = 343,
    burst: float = 1.0,
) -> Trace:
    """Open-loop chat load in the manner of Mooncake's traces: sessions of one or a few requests, people in between.

    Mean lengths are those published for its conversation trace. `burst` > 1: arrivals come in clumps of that size on
    average, at the same rate. Every session ends with its last request (`Wait.ends`).
    """
    if arrivals_per_s <= 0 or burst < 1 or sessions < 0 or min(prompt_tokens, output_tokens) < 1:
        raise ConfigError(f"sessions={sessions}, arrivals_per_s={arrivals_per_s}, burst={burst} describes no load")
    rng = random.Random(f"{seed}/requests")  # noqa: S311
    made = tuple(_chat(rng, f"r{index:06d}", prompt_tokens, output_tokens) for index in range(sessions))
    count = sum(len(session) for session in made)
    return Trace(
        sessions=made,
        skipped=Skips(records=count, used=count),
        source=f"synthetic requests, seed {seed}",
        arrivals_s=_poisson(rng, sessions, arrivals_per_s, burst=burst),
    )


def _session(rng: random.Random, name: str, *, tools: bool, humans: bool, steps: int | None) -> tuple[Wait, ...]:
    system = rng.randrange(8_000, 17_000)
    context = max(system + 500, round(FIRST.at(rng.gauss(0, 1))))
    window = LARGE_WINDOW if context > SMALL_WINDOW - 20_000 or rng.random() < LARGE_SHARE else SMALL_WINDOW
    favours: dict[int, float] = {}
    pace, patience = rng.gauss(0, 1), rng.gauss(0, 1)
    now_s = 0.0
    waits: list[Wait] = []
    for step in range(steps or max(2, round(STEPS.at(rng.gauss(0, 1))))):
        output = round(OUTPUT.at(rng.gauss(0, 1)))
        llm_s = round((2.0 + output / 55) * math.exp(rng.gauss(0, 0.25)), _DECIMALS)
        start_s = round(now_s + llm_s, _DECIMALS)
        after, reuse = _next_prompt(rng, context, output, system, window)
        facts = {
            "session": name,
            "step": step,
            "start_s": start_s,
            "prompt_tokens": context,
            "output_tokens": output,
            "next_prompt_tokens": after,
            "reuse_tokens": reuse,
            "llm_s": llm_s,
        }
        if humans and (not tools or rng.random() < HUMAN_SHARE):
            score = math.sqrt(0.2) * patience + math.sqrt(0.8) * rng.gauss(0, 1)
            wait = Wait(kind="human", duration_s=round(HUMAN.at(score), _DECIMALS), **facts)  # type: ignore[arg-type]
        else:
            wait = _tools(rng, facts, pace, favours)
        waits.append(wait)
        now_s, context = start_s + wait.duration_s, after
    return tuple(waits)


def _tools(rng: random.Random, facts: dict[str, object], pace: float, favours: dict[int, float]) -> Wait:
    """One tool call, or several side by side: then the wait is for the last of them."""
    count = 1 if rng.random() >= PARALLEL_SHARE else 2 + min(4, int(rng.expovariate(1.2)))
    calls = tuple(_call(rng, facts, pace, favours, count) for _ in range(count))
    if count == 1:
        return calls[0]
    last = max(calls, key=lambda call: call.duration_s)
    return Wait(**{name: getattr(last, name) for name in Wait.__slots__ if name != "calls"}, calls=calls)


def _call(rng: random.Random, facts: dict[str, object], pace: float, favours: dict[int, float], count: int) -> Wait:
    index = bisect.bisect_right(_SUMS, rng.random() * _SUMS[-1])
    command = COMMANDS[min(index, len(COMMANDS) - 1)]
    own = favours.setdefault(index, rng.gauss(0, 1))
    rest = 1 - SESSION_PART - COMMAND_PART
    score = math.sqrt(SESSION_PART) * pace + math.sqrt(COMMAND_PART) * own + math.sqrt(rest) * rng.gauss(0, 1)
    duration_s = max(_SHORTEST_S, command.spread.at(score))
    timeout_s = _timeout_s(rng, command)
    censored = timeout_s is not None and duration_s >= timeout_s
    return Wait(
        kind="tool",
        tool=command.tool,
        command=command.command,
        duration_s=round(timeout_s if censored and timeout_s is not None else duration_s, _DECIMALS),
        censored=censored,
        timeout_s=timeout_s,
        parallel=count,
        arg_bytes=max(1, round(command.arg_bytes * math.exp(rng.gauss(0, 0.6)))),
        **facts,  # type: ignore[arg-type]
    )


def _timeout_s(rng: random.Random, command: Command) -> float | None:
    drawn = rng.random()
    for seconds, share in command.timeouts:
        if drawn < share:
            return seconds
        drawn -= share
    return None


def _next_prompt(rng: random.Random, context: int, output: int, system: int, window: int) -> tuple[int, int]:
    """(next prompt, how much of this prompt it begins with): growth, a broken prefix, or a compaction."""
    grown = context + output + round(RESULT.at(rng.gauss(0, 1)))
    whole = context // BLOCK_TOKENS * BLOCK_TOKENS
    start = min(system, context) // BLOCK_TOKENS * BLOCK_TOKENS
    if grown > window:
        return system + round(rng.uniform(8_000, 40_000)), start
    if rng.random() < BREAK_SHARE:
        return grown, start
    return grown, whole


def _chat(rng: random.Random, name: str, prompt_tokens: int, output_tokens: int) -> tuple[Wait, ...]:
    turns = 1 + min(20, int(rng.expovariate(1.1)))
    context = max(16, round(prompt_tokens * 0.6 * math.exp(rng.gauss(0, 1.0))))
    now_s, waits = 0.0, []
    for turn in range(turns):
        output = max(1, round(output_tokens * 0.6 * math.exp(rng.gauss(0, 1.0))))
        llm_s = round(1.0 + output / 55, _DECIMALS)
        last = turn == turns - 1
        after = 0 if last else context + output + max(1, round(60 * math.exp(rng.gauss(0, 1.5))))
        duration_s = 0.0 if last else round(HUMAN.at(rng.gauss(-0.5, 1)), _DECIMALS)
        start_s = round(now_s + llm_s, _DECIMALS)
        waits.append(
            Wait(
                session=name,
                step=turn,
                kind="human",
                start_s=start_s,
                duration_s=duration_s,
                prompt_tokens=context,
                output_tokens=output,
                next_prompt_tokens=after,
                reuse_tokens=0 if last else context,
                llm_s=llm_s,
            )
        )
        now_s, context = start_s + duration_s, after
    return tuple(waits)


def _poisson(rng: random.Random, count: int, per_s: float | None, *, burst: float = 1.0) -> tuple[float, ...]:
    """Arrival times from 0. Clumps of `burst` on average (geometric), clumps themselves a Poisson process."""
    if per_s is None:
        return ()
    if not 0 < per_s < math.inf:
        raise ConfigError(f"arrivals_per_s={per_s}: a rate is finite and > 0")
    times: Sequence[float] = list(
        itertools.accumulate(
            0.0 if number == 0 or rng.random() < 1 - 1 / burst else rng.expovariate(per_s / burst)
            for number in range(count)
        )
    )
    return tuple(round(each, _DECIMALS) for each in times)


_SUMS = list(itertools.accumulate(command.share for command in COMMANDS))
