"""An agent whose prompts break the cache at every call, what that costs, and the same agent with a prompt that grows.

python examples/prefix_check.py              # both agents, no model needed
python examples/prefix_check.py trace.jsonl  # also write the first one's requests, for `agentkv prefix-check trace.jsonl`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from agentkv.context.bodies import call_of
from agentkv.context.check import Check
from agentkv.context.layout import Layout
from agentkv.context.segment import Place
from agentkv.context.tokens import count_text
from agentkv.core.message import Message, ToolCall, ToolSpec

RULES = "You repair programs. Read before you write, run the tests after each change, and say what you did. " * 20
NAMES = ["read_file", "write_file", "run_tests", "search"]
STEPS = 6


def turn(step: int) -> list[Message]:
    """What a step adds: a call and its result."""
    call = ToolCall(id=f"call_{step}", name="read_file", arguments=json.dumps({"path": f"src/part_{step}.py"}))
    return [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=f"def part_{step}(): ...\n" * 10, tool_call_id=call.id),
    ]


def system(step: int) -> Message:
    return Message(role="system", content=f"It is 12:0{step}, step {step}. {RULES}")


def tools(step: int) -> list[ToolSpec]:
    """The same four tools, in another order at each step: they come from a set."""
    return [ToolSpec(name=NAMES[(place + step) % len(NAMES)], parameters={"type": "object"}) for place in range(4)]


def careless_requests() -> Iterator[dict[str, object]]:
    """Request bodies as a client sends them: a clock and a step number at the head, tools in any order."""
    said = [Message(role="user", content="Make the tests pass.")]
    for step in range(STEPS):
        yield {
            "model": "gpt-4o",
            "messages": [_body(message) for message in (system(step), *said)],
            "tools": [{"type": "function", "function": {"name": tool.name}} for tool in tools(step)],
        }
        said += turn(step)


def careful_layout() -> Layout:
    """The same content in a layout: tools in one order, changing values told at the end."""
    layout = Layout(volatile=("clock", "counter"), count=count_text)
    layout.append(Message(role="user", content="Make the tests pass."))
    for step in range(STEPS):
        layout.put(Place.SYSTEM, [system(step)])
        layout.put_tools(tools(step))
        layout.arrange()
        layout.append(*turn(step))
    return layout


def _body(message: Message) -> dict[str, object]:
    body: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def main() -> None:
    requests = list(careless_requests())
    for path in sys.argv[1:2]:
        Path(path).write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    check = Check(count=count_text)
    print("As most agents do it:")
    for request in requests:
        print(" ", check.feed(call_of(request)).told)
    print(f"  {check.append_share:.0%} of the calls extend the one before; {check.lost_tokens} tokens computed again")
    print("With a layout:")
    told = careful_layout().explain()
    for one in told:
        print(" ", one)
    print(f"  {sum(one.lost_tokens or 0 for one in told)} tokens computed again")


if __name__ == "__main__":
    main()
