"""An agent loop with nothing but the openai package: the client reaches the engine in this process.

python examples/08_plain_openai.py --scripted     # no model needed
python examples/08_plain_openai.py                # with the embedded model
"""

from __future__ import annotations

import json
import sys
from typing import Any

from agentkv import AgentKV, ScriptedEngine, ToolCall

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    }
]


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="shell", arguments='{"cmd": "ls -l"}')
        return AgentKV.with_engine(ScriptedEngine([call, "There are two files."]))
    return AgentKV.local(ledger="memory")


def main() -> None:
    with connect() as kv, kv.task("count-files"):
        client = kv.openai()
        messages: list[Any] = [{"role": "user", "content": "How many files are there?"}]
        for _ in range(5):
            choice = client.chat.completions.create(
                model=kv.engine.model, messages=messages, tools=TOOLS, max_tokens=60
            ).choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if not choice.message.tool_calls:
                print(choice.message.content)
                break
            for call in choice.message.tool_calls:
                args = json.loads(call.function.arguments)
                with kv.tool(call.function.name, args=args, call_id=call.id) as running:
                    output = running.slim("README.md\nMakefile")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        print(kv.report("count-files"))


if __name__ == "__main__":
    main()
