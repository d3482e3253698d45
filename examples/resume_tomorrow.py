"""A conversation that goes on tomorrow: its KV waits on disk, so that nothing old is computed again.

python examples/resume_tomorrow.py ./thread     # today: the first turn
python examples/resume_tomorrow.py ./thread     # tomorrow: the next one, in another process
agentkv sessions list --disk ./thread/kv        # what waits there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict, messages_to_dict

from agentkv import AgentKV

QUESTION = "Here is line {n} of my notes: the third assertion failed because the total was rounded twice. What failed?"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    history = folder / "history.json"
    messages = messages_from_dict(json.loads(history.read_text())) if history.exists() else []
    turn = 1 + sum(isinstance(message, AIMessage) for message in messages)
    messages.append(HumanMessage(QUESTION.format(n=turn)))

    with AgentKV.local("smollm2-135m", device_memory="64MiB", disk=folder / "kv", persist=True, ledger="memory") as kv:
        with kv.task("notes", final=False):  # the task goes on: its sessions are kept
            answer = ChatAgentKV(kv, max_tokens=32).invoke(messages)
        usage = kv.report("notes").usage

    history.write_text(json.dumps(messages_to_dict([*messages, answer])))
    print(f"turn {turn}: {answer.text}")
    print(f"{usage.cached_tokens} of {usage.input_tokens} input tokens came from disk")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "thread"))
