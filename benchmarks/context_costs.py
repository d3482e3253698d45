"""What the context costs on the agent's own thread, per model call: from `kv.submit` to the engine, with and without.

Covers layout and counting (repair, view, canonical tools, count, the question whether to fold) at 100 to 10,000
messages, where each call brings one assistant turn and one tool result that are new; slimming of that result is told
apart. `rebuilt` gives new message objects at every call, as a framework's adapter does.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from common import median
from context_loops import Loop
from context_ours import TOOL

from agentkv import AgentKV, Message, Request, ScriptedEngine, ToolCall
from agentkv.context.options import Context
from agentkv.engine.stream import Stream

CALLS = 30


class Doorstep(ScriptedEngine):
    """Notes when a request arrives, then answers its last message alone, so that its own work costs nothing."""

    arrived_s = 0.0

    def count_tokens(self, request: Request) -> int:  # noqa: ARG002  the budget asks; a script splits into words anew
        return 1

    def submit(self, request: Request) -> Stream:
        self.arrived_s = time.perf_counter()
        return super().submit(replace(request, messages=(Message(role="user", content="x"),), tools=()))


def layout_ms(loop: Loop, messages: int, *, slim: bool = False, rebuilt: bool = False) -> float:
    """Milliseconds per call that the context adds (median with it less median without it), at `messages` messages."""
    history = _history(loop, messages + 2 * CALLS)
    ours = Context(slim=slim, soft_mark=10**9)
    return _to_the_engine(history, messages, ours, rebuilt) - _to_the_engine(history, messages, None, rebuilt)


def _to_the_engine(history: list[Message], messages: int, context: Context | None, rebuilt: bool) -> float:
    engine = Doorstep(itertools.repeat("ok"), context_tokens=10**9)
    taken = []
    with AgentKV.with_engine(engine, context=context) as kv, kv.task("bench"):
        for end in range(messages, messages + 2 * CALLS, 2):
            grown = tuple(replace(message) for message in history[:end]) if rebuilt else tuple(history[:end])
            request = Request(messages=grown, tools=(TOOL,))
            started_s = time.perf_counter()
            stream = kv.submit(request)
            taken.append((engine.arrived_s - started_s) * 1e3)
            stream.result(30)
    return median(taken[1:])


def _history(loop: Loop, messages: int) -> list[Message]:
    """So many messages and a bit more; every output is another one."""
    result = [Message(role="system", content=loop.system), Message(role="user", content=loop.request)]
    steps = [step for step in loop.steps if len(step.output) < 8000]
    for number in itertools.count():
        if len(result) > messages:
            return result
        step, key = steps[number % len(steps)], f"call_{number:06d}"
        call = ToolCall(id=key, name=TOOL.name, arguments=f'{{"command": "echo {number}"}}')
        result += [
            Message(role="assistant", content=f"{number}: {step.text}", tool_calls=(call,)),
            Message(role="tool", content=f"{number}\n{step.output}", tool_call_id=key, name=TOOL.name),
        ]
    raise AssertionError
