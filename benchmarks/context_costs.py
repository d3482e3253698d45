"""What the context costs on the agent's own thread: layout and counting per model call, with one new message a call.

Covers 100, 200, 1,000 and 10,000 messages. The outputs are new each time, so that nothing is answered from a memo of
the same text.
"""

from __future__ import annotations

import statistics
import time

from context_loops import Loop

from agentkv.context.counter import Counter
from agentkv.context.notebook import Notebook
from agentkv.context.slim import Slimmer
from agentkv.context.tokens import count_text
from agentkv.context.view import Stages, View
from agentkv.core.message import Message, ToolCall

CALLS = 40


def layout_ms(loop: Loop, messages: int) -> float:
    """Median milliseconds per call of a view that holds `messages` messages: take in the new ones, give the prompt.

    A call brings one assistant turn or one tool result; the views are filled before the clock starts.
    """
    counter = Counter(count_text)
    stages = Stages(counter=counter, notebook=Notebook(None), slimmer=Slimmer(outputs=None, count=counter.text))
    view = View(stages)
    history = _history(loop, messages + CALLS)
    view.extend(tuple(history[:messages]))
    view.prompt()
    taken = []
    for number in range(messages, messages + CALLS):
        grown = tuple(history[: number + 1])
        started_s = time.perf_counter()
        assert view.continues(grown)
        view.extend(grown)
        view.tools(())
        view.propose()
        view.prompt()
        taken.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(taken)


def _history(loop: Loop, messages: int) -> list[Message]:
    result = [Message(role="system", content=loop.system), Message(role="user", content=loop.request)]
    steps = [step for step in loop.steps if len(step.output) < 8000]
    number = 0
    while len(result) < messages:
        step, key = steps[number % len(steps)], f"call_{number:06d}"
        call = ToolCall(id=key, name="bash", arguments=f'{{"command": "{number}"}}')
        result += [
            Message(role="assistant", content=f"{number}: {step.text}", tool_calls=(call,)),
            Message(role="tool", content=f"{number}\n{step.output}", tool_call_id=key, name="bash"),
        ]
        number += 1
    return result[:messages]
