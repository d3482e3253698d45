"""A bill with a timeline: a small agent with tools, printed and written as a page.

python examples/bill.py            # print the bill
python examples/bill.py bill.html  # and write the page
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from agentkv import AgentKV, Message, Request, Sampling, ScriptedEngine
from agentkv.clock import ManualClock

TASK = "fix-rounding"
STEPS = (
    ("ls src", "ls", 0.2),
    ("pytest -q", "pytest", 42.0),
    ("grep -rn round src", "grep", 0.8),
    ("pytest -q tests/test_money.py", "pytest", 9.0),
    ("ruff check", "ruff", 1.5),
    ("pytest -q", "pytest", 40.0),
)


def main(page: Path | None) -> None:
    clock = ManualClock(wall_ms=1_780_000_000_000)  # an hour passes in no time
    words = itertools.repeat("I will look at the next place where amounts are rounded and then run the tests again.")
    engine = ScriptedEngine(words, clock=clock, latency_s=0.05)
    with AgentKV.with_engine(engine, clock=clock) as kv, kv.task(TASK, final=False):
        said = [Message(role="user", content="The invoice total is off by a cent: find out why and mend it.")]
        for command, tool, seconds in STEPS * 2:
            answer = kv.submit(Request(messages=tuple(said), sampling=Sampling(max_tokens=64))).result()
            with kv.tool(tool, args={"cmd": command}):
                clock.advance(seconds)
            said.append(Message(role="assistant", content=answer.text))
            said.append(
                Message(role="user", content=f"{command}: exit code 0 after {seconds} s. " + "line of output " * 40)
            )
        bill = kv.report(TASK)
    print(bill)
    if page is not None:
        page.write_text(bill.to_html(), encoding="utf-8")
        print(f"\nwritten to {page}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
