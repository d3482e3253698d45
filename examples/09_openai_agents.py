"""The OpenAI Agents SDK over the embedded engine: its client, a task, and decorated tools.

Tools are strict there: the embedded engine writes no arguments that their schema forbids.

pip install openai-agents
python examples/09_openai_agents.py --scripted     # no model needed
python examples/09_openai_agents.py                # with the embedded model
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from agentkv import AgentKV, ScriptedEngine, ToolCall


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="shell", arguments='{"cmd": "ls -l"}')
        return AgentKV.with_engine(ScriptedEngine([call, "There are two files."]))
    return AgentKV.local(ledger="memory")


async def main() -> None:
    set_tracing_disabled(True)  # it would go over the network
    with connect() as kv:

        @function_tool
        @kv.tool_function
        async def shell(cmd: str) -> str:
            """Run a command.

            Args:
                cmd: the command line.
            """
            await asyncio.sleep(0.1)
            return f"{cmd}: README.md Makefile"

        model = OpenAIChatCompletionsModel(model=kv.engine.model, openai_client=kv.async_openai())
        settings = ModelSettings(temperature=0, max_tokens=200)
        agent = Agent(name="counter", instructions="Be brief.", tools=[shell], model=model, model_settings=settings)
        async with kv.task("count-files"):
            result = await Runner.run(agent, "How many files are there?")
        print(result.final_output)
        print(kv.report("count-files"))


if __name__ == "__main__":
    asyncio.run(main())
