"""The same budgets and bills in front of any OpenAI-compatible endpoint.

OPENAI_API_KEY=... python examples/remote_openai.py https://api.openai.com/v1 gpt-5-mini
python examples/remote_openai.py --scripted     # no endpoint, for a quick look
"""

from __future__ import annotations

import os
import sys

from agentkv_langgraph import ChatAgentKV

from agentkv import AgentKV, Budget, BudgetExceeded, ScriptedEngine


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        return AgentKV.with_engine(ScriptedEngine(["A cache keeps what was computed.", "It saves time."]))
    base_url, model = sys.argv[1:3]
    return AgentKV.remote(base_url=base_url, model=model, api_key=os.environ.get("OPENAI_API_KEY"), ledger="memory")


def main() -> None:
    with connect() as kv:
        model = ChatAgentKV(kv, max_tokens=60)
        with kv.task("two-questions", budget=Budget(tokens=500, model_calls=2)):
            for question in ("What is a KV cache?", "What is it good for?", "One question too many?"):
                try:
                    print(f"{question}\n  {model.invoke(question).text}")
                except BudgetExceeded as error:
                    print(f"{question}\n  refused: {error}")
        print(kv.report("two-questions"))


if __name__ == "__main__":
    main()
