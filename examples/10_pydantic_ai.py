"""pydantic-ai over the embedded engine: its client, a task, and decorated tools.

Tools are strict there where their schemas allow it: the embedded engine writes no arguments that one forbids.

pip install "pydantic-ai-slim[openai]"
python examples/10_pydantic_ai.py --scripted     # no model needed
python examples/10_pydantic_ai.py                # with the embedded model
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentkv import AgentKV, ScriptedEngine, ToolCall


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="shell", arguments='{"cmd": "ls -l"}')
        return AgentKV.with_engine(ScriptedEngine([call, "There are two files."]))
    return AgentKV.local(ledger="memory")


async def main() -> None:
    with connect() as kv:
        provider = OpenAIProvider(openai_client=kv.async_openai())
        model = OpenAIChatModel(kv.engine.model, provider=provider)
        settings = ModelSettings(temperature=0, max_tokens=200)
        agent = Agent(model, instructions="Be brief.", deps_type=str, model_settings=settings)

        @agent.tool
        @kv.tool_function
        async def shell(ctx: RunContext[str], cmd: str) -> str:
            """Run a command."""
            await asyncio.sleep(0.1)
            return f"{cmd} in {ctx.deps}: README.md Makefile"

        async with kv.task("count-files"):
            result = await agent.run("How many files are there?", deps="project")
        print(result.output)
        print(kv.report("count-files"))


if __name__ == "__main__":
    asyncio.run(main())
