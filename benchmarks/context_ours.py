"""Ours, on the public way: `AgentKV.with_engine(...).submit(...)` in a plain loop, nothing but the context's options set.

Covers the two loops against the fake model, and the append steps against the embedded engine on real weights. The
summary calls are made by the same fake model, and the meter sees them as it sees those of the others.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from context_brain import BLOCK, Brain, Meter, Run, Sent, Turn, result, wire_call
from context_loops import TOOL_DESCRIPTION, TOOL_NAME, Loop, Step

from agentkv import AgentKV, Message, Request, Sampling, ScriptedEngine, ToolCall, ToolSpec
from agentkv.context.canonical import tools_text
from agentkv.context.options import Context
from agentkv.engine.script import Reply

TOOL = ToolSpec(
    name=TOOL_NAME,
    description=TOOL_DESCRIPTION,
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
SETTINGS: dict[str, Context | None] = {
    "off": None,
    "defaults": Context(),
    "soft mark 6k, keep 2": Context(soft_mark=6000, keep_last=2, slim_tokens=800),
    "soft mark 9k, keep 2": Context(soft_mark=9000, keep_last=2, slim_tokens=800),
}


def ours(loop: Loop, setting: str) -> Run:
    """One loop with one of SETTINGS."""
    brain = Brain(loop, Meter(loop))
    engine = _engine(brain)
    with AgentKV.with_engine(engine, context=SETTINGS[setting]) as kv, kv.task("bench"):
        messages = [Message(role="system", content=loop.system), Message(role="user", content=loop.request)]
        while True:
            generation = kv.submit(Request(messages=tuple(messages), tools=(TOOL,))).result(60)
            messages.append(Message(role="assistant", content=generation.text, tool_calls=generation.tool_calls))
            if not generation.tool_calls:
                break
            messages += [
                Message(role="tool", content=_ran(brain, call), tool_call_id=call.id, name=call.name)
                for call in generation.tool_calls
            ]
    return result("agentkv", setting, brain)


def ours_in_an_agent(loop: Loop, setting: str) -> Run:
    """The same through langchain's create_agent with ChatAgentKV as its model, where langchain is installed."""
    name = f"{setting}, in create_agent"
    try:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool
    except ImportError:
        return Run(name="agentkv", loop=loop.name, setting=name, skipped="langchain is not installed")
    from agentkv_langgraph import ChatAgentKV

    brain = Brain(loop, Meter(loop))
    tool = StructuredTool.from_function(
        func=brain.output, name=TOOL.name, description=TOOL.description, args_schema=dict(TOOL.parameters)
    )
    with AgentKV.with_engine(_engine(brain), context=SETTINGS[setting]) as kv, kv.task("bench"):
        agent = create_agent(ChatAgentKV(kv), tools=[tool], system_prompt=loop.system)
        agent.invoke({"messages": [{"role": "user", "content": loop.request}]}, {"recursion_limit": 100_000})
    return result("agentkv", name, brain)


def _engine(brain: Brain) -> ScriptedEngine:
    numbers = itertools.count()

    def answer(request: Request) -> Reply:
        turn = brain.answer([_sent(message) for message in request.messages or ()], tools_text(request.tools))
        calls = (ToolCall(id=key, name=name, arguments=text) for key, name, text in wire_call(turn, next(numbers)))
        return Reply(text=turn.text, tool_calls=tuple(calls))

    return ScriptedEngine(itertools.repeat(answer), context_tokens=1_000_000)


def _ran(brain: Brain, call: ToolCall) -> str:
    return brain.output(json.loads(call.arguments)["command"])


def _sent(message: Message) -> Sent:
    calls = tuple((call.id, call.name, call.arguments) for call in message.tool_calls)
    return Sent(role=message.role, content=message.content, calls=calls, call_id=message.tool_call_id or "")


def append_steps(loop: Loop, steps: int = 8) -> dict[str, float]:
    """The first steps of `loop` on the embedded engine: are all requests extensions, and is the shared part reused?

    `append_ok` is the share of requests that extend the one before, byte for byte, in what the engine got.
    `engine_prefix_hit` is the least share, over the calls, of the shared prefix (in whole blocks) that the engine says
    it reused (`usage.cached_tokens`).
    """
    with AgentKV.local(device_memory="512MiB", ledger="memory") as kv, kv.task("bench"):
        seen: list[tuple[tuple[Message, ...], int]] = []
        submit = kv.engine.submit

        def watched(request: Request) -> Any:
            seen.append((request.messages or (), kv.engine.count_tokens(request)))
            return submit(request)

        kv.engine.submit = watched  # type: ignore[method-assign]
        messages = [Message(role="system", content=loop.system), Message(role="user", content=loop.request)]
        shares, extensions = [], 0
        for number, step in enumerate(loop.steps[:steps]):
            request = Request(messages=tuple(messages), tools=(TOOL,), sampling=Sampling(max_tokens=4))
            generation = kv.submit(request).result(300)
            if number:
                (before, before_tokens), (now, _) = seen[-2], seen[-1]
                extensions += now[: len(before)] == before
                shares.append(generation.usage.cached_tokens / (before_tokens // BLOCK * BLOCK))
            ((key, name, arguments),) = wire_call(_turn(step), number)
            call = ToolCall(id=key, name=name, arguments=arguments)
            messages.append(Message(role="assistant", content=step.text, tool_calls=(call,)))
            messages.append(Message(role="tool", content=step.output, tool_call_id=key, name=name))
    return {"append_ok": extensions / len(shares), "engine_prefix_hit": round(min(shares), 4)}


def _turn(step: Step) -> Turn:
    return Turn(text=step.text, command=step.command)
