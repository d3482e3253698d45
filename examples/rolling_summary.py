"""A long tool loop under a small mark: when it is folded, why, and what each call has to compute again.

python examples/rolling_summary.py             # a scripted model writes the summaries
python examples/rolling_summary.py --extract   # no model: the deterministic extract
"""

from __future__ import annotations

import sys

from agentkv import ScriptedEngine
from agentkv.context.notebook import Fold, Notebook, chain
from agentkv.context.summary import Folder, is_summary
from agentkv.context.tokens import count_messages
from agentkv.core.message import Message, ToolCall
from agentkv.engine.base import Request

STEPS = 40
ANSWER = """Goal: move the billing service to port 5433
Decisions:
- keep SQLite
Facts:
- the invoice total is 4711.50 EUR
Files:
- billing/config.toml
Open items:
- rotate the key of the old server"""


def tokens_of(message: Message) -> int:
    return count_messages([message])


def step(number: int) -> list[Message]:
    call = ToolCall(id=f"call-{number}", name="shell", arguments=f'{{"cmd": "pytest -q tests/part_{number}.py"}}')
    lines = [f"tests/part_{number}.py::test_case_{case} PASSED" for case in range(12)]
    output = "\n".join([*lines, f"{len(lines)} passed in 1.{number}s"])
    return [
        Message(role="assistant", content=f"Next is part {number}.", tool_calls=(call,)),
        Message(role="tool", content=output, tool_call_id=call.id),
    ]


def main() -> None:
    engine = ScriptedEngine(ANSWER for _ in range(STEPS))
    folder = Folder(notebook=Notebook(), soft_tokens=2_000, count=tokens_of)
    messages, digests, tokens = [], [], []
    fold: Fold | None = None
    sent: tuple[Message, ...] = ()
    start = [
        Message(role="system", content="You maintain a billing service."),
        Message(role="user", content="Move it to port 5433."),
    ]
    computed = plain = 0
    for number in range(STEPS):
        for message in step(number) if number else start:
            messages.append(message)
            digests.append(chain(digests[-1] if digests else b"", message))
            tokens.append(tokens_of(message))
        proposal = folder.propose(messages, digests, tokens, fold=fold)
        if proposal.kind == "fold":
            print(f"call {number}: {proposal.reason}")
            made = (
                folder.extracted(proposal) if "--extract" in sys.argv else written(folder.flow(proposal, sent), engine)
            )
            fold = made or fold
        before, sent = sent, folder.applied(fold, messages)
        shared = next((n for n, pair in enumerate(zip(before, sent, strict=False)) if pair[0] != pair[1]), len(before))
        computed += count_messages(sent[shared:])
        plain += count_messages(messages)
    print(f"the last prompt has {count_messages(sent):,} tokens instead of {count_messages(messages):,}")
    print(
        f"read by the model in all calls: {plain:,} tokens without folds; computed, with the prefix cached: {computed:,}"
    )
    print(next(message.content for message in sent if is_summary(message)))
    engine.close()


def written(flow, engine) -> Fold | None:
    """Drive the flow: it yields prompts and wants the answer, or the error."""
    try:
        prompt = next(flow)
        while True:
            try:
                answer = engine.submit(Request(messages=prompt)).result().text
            except Exception as error:
                answer = error
            prompt = flow.send(answer)
    except StopIteration as ended:
        return ended.value


if __name__ == "__main__":
    main()
