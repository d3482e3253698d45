"""Workload: a trace made into turns that a given device can hold, and when each session starts.

Covers scaling (a session longer than the window is shrunk in proportion), waits on people on or off, classes, closed
and open loop. Does not cover the trace's own formats (`trace.py`). Tokens and seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentkv.errors import ConfigError
from agentkv.sim.costs import Costs
from agentkv.sim.trace import Trace, Wait

SMALLEST_WINDOW = 64
PERSON = "person"
"""The tool name under which waits on people are learnt, in the runtime as here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model call and the wait after it.

    `reuse_tokens`: so many tokens of this prompt are those of the last one. `wait_s`: None after the last turn.
    """

    prompt_tokens: int
    output_tokens: int
    reuse_tokens: int
    wait_s: float | None = None
    tool: str = ""
    command: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One task: its turns in order. `priority` 0, or -1 for batch work; `steps` is known in advance only to bounds."""

    name: str
    turns: tuple[Turn, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions in the order in which they start. `arrivals_s` empty: closed loop of `agents`; else when each arrives."""

    sessions: tuple[Session, ...]
    agents: int
    arrivals_s: tuple[float, ...] = ()

    @property
    def waits(self) -> int:
        """How many waits there are in all."""
        return sum(turn.wait_s is not None for session in self.sessions for turn in session.turns)


def workload(
    trace: Trace,
    *,
    agents: int,
    seed: int = 0,
    sessions: int | None = None,
    window_tokens: int = 131_072,
    humans: bool = True,
    open_loop: bool = False,
    load: float = 1.0,
    batch_share: float = 0.0,
    costs: Costs | None = None,
) -> Workload:
    """`sessions` sessions of the trace in an order drawn with `seed` (all when None; drawn again when it has fewer).

    A session whose context would outgrow `window_tokens` is shrunk in proportion, all its counts alike. Without
    `humans` a person answers at once. `open_loop`: sessions arrive at random, at `load` times the rate at which
    `agents` agents would start them if nobody ever waited for the device (needs `costs`). `batch_share` of the
    sessions are batch work of a lower class. Raises ConfigError on numbers that describe no workload.
    """
    if agents < 1 or (sessions is not None and sessions < 1) or window_tokens < SMALLEST_WINDOW:
        raise ConfigError(f"agents={agents}, sessions={sessions}, window_tokens={window_tokens}: too small to simulate")
    if not 0 <= batch_share <= 1 or not 0 < load < float("inf"):
        raise ConfigError(f"batch_share={batch_share} is a share, load={load} is > 0")
    rng = random.Random(seed)  # noqa: S311  a simulation, not a secret
    usable = [waits for waits in trace.sessions if any(wait.prompt_tokens > 0 for wait in waits)]
    if not usable:
        raise ConfigError(
            f"{trace.source or 'the trace'}: no session has token counts, so there is nothing to simulate"
        )
    wanted = len(usable) if sessions is None else sessions
    drawn: list[tuple[Wait, ...]] = []
    while len(drawn) < wanted:
        drawn += rng.sample(usable, min(len(usable), wanted - len(drawn)))
    made = tuple(
        Session(
            name=f"{waits[0].session}#{number}",
            turns=_turns(waits, window_tokens, humans=humans),
            priority=-1 if rng.random() < batch_share else 0,
        )
        for number, waits in enumerate(drawn)
    )
    if not open_loop:
        return Workload(sessions=made, agents=agents)
    if costs is None:
        raise ConfigError("an open loop needs costs: how fast could the sessions be?")
    gap_s = sum(alone_s(session, costs) for session in made) / len(made) / agents / load
    time_s, arrivals = 0.0, []
    for _ in made:
        arrivals.append(time_s)
        time_s += rng.expovariate(1 / gap_s) if gap_s > 0 else 0.0
    return Workload(sessions=made, agents=agents, arrivals_s=tuple(arrivals))


def alone_s(session: Session, costs: Costs) -> float:
    """How long the session would take with the device to itself and its context never away."""
    total_s = 0.0
    for turn in session.turns:
        mean_tokens = turn.prompt_tokens + turn.output_tokens / 2
        total_s += costs.prefill.extend_s(turn.reuse_tokens, turn.prompt_tokens)
        total_s += turn.output_tokens * (costs.decode_base_s + costs.decode_per_token_s * mean_tokens)
        total_s += turn.wait_s or 0.0
    return total_s


def _turns(waits: tuple[Wait, ...], window_tokens: int, *, humans: bool) -> tuple[Turn, ...]:
    largest = max(max(wait.prompt_tokens, wait.next_prompt_tokens) + wait.output_tokens for wait in waits)
    scale = min(1.0, window_tokens / max(1, largest))
    turns: list[Turn] = []
    reuse = 0
    for wait in waits:
        prompt = max(1, int(wait.prompt_tokens * scale))
        output = max(1, min(int(wait.output_tokens * scale), window_tokens - prompt))
        last = wait.next_prompt_tokens == 0
        person = wait.kind == "human"
        turns.append(
            Turn(
                prompt_tokens=prompt,
                output_tokens=output,
                reuse_tokens=min(reuse, prompt - 1),
                wait_s=None if last else 0.0 if person and not humans else max(0.0, wait.duration_s),
                tool=PERSON if person else wait.tool or "tool",
                command=wait.command,
                timeout_s=wait.timeout_s,
            )
        )
        if last:
            return tuple(turns)
        reuse = int(min(wait.reuse_tokens, wait.prompt_tokens) * scale)
    prompt = max(1, int(waits[-1].next_prompt_tokens * scale))
    output = max(1, min(turns[-1].output_tokens, window_tokens - prompt))
    return (*turns, Turn(prompt_tokens=prompt, output_tokens=output, reuse_tokens=min(reuse, prompt - 1)))
