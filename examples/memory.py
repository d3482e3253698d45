"""Memories: documents and conclusions outlive the prompt; what is recalled goes in only where it pays.

python examples/memory.py              # in RAM, nothing is left behind
python examples/memory.py ./mem.sqlite # kept: run it twice and the second run knows more
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentkv.context.counter import Counter
from agentkv.context.memory import Memory, Shingles, decide
from agentkv.context.tokens import TextCounter
from agentkv.core.message import Message

HANDBOOK = """The staging database listens on port 6543; production keeps the default of 5432.

Deployments to production are frozen from Friday noon until Monday morning.

Error E4107 means that the tenant's quota for exports is used up."""

QUESTIONS = (
    "Which port do I use for the staging database?",
    "Why was the login test flaky?",
    "Write a haiku about autumn leaves.",
)


def main(path: Path | None) -> None:
    counter = Counter(TextCounter("gpt-4o"))
    with Memory(path, count=counter.text) as memory:
        for paragraph in HANDBOOK.split("\n\n"):
            memory.remember(paragraph, source="handbook.md")  # returns at once; a thread writes
        memory.remember(
            "The flaky login test was caused by a clock that jumped.", kind="episodic", task="fix-login", source="task"
        )
        memory.flush()  # only because this program asks right away

        prompt = [Message(role="system", content="You help the operations team.")]
        there = Shingles(prompt[0].content)  # what the prompt says already, read once as it grows
        for question in QUESTIONS:
            injection = decide(memory.recall(question, k=3), prompt=there, max_tokens=200)
            content = "\n\n".join(part for part in (question, injection.text()) if part)
            prompt.append(Message(role="user", content=content))  # at the tail, and there to stay
            there.add(content)
            print(f"{question}\n  injected {injection.tokens} tokens, left out {len(injection.skipped)}")
            for line in injection.text().splitlines()[1:]:
                print(f"  {line}")
        print(f"prompt: {counter.prompt(prompt)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
