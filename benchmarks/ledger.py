"""The ledger: what an append costs its caller, how many events a second reach the disk, and how long a bill takes.

`events_per_s`: a million events of many tasks, appended as fast as the disk takes them, the median over stretches of
50,000. `append_us`: the mean cost of an append at a steady 20,000 events/s, the writing thread's share of the
interpreter lock included. `bill_10k_ms`: opening a ledger, reading a task of 10,000 events and making its bill;
`bill_1m_ms`: the same where a million other events are in the file; each the least of several. SQLite in a temporary folder.
"""

from __future__ import annotations

import random
import tempfile
import time
from decimal import Decimal
from functools import partial
from pathlib import Path

from common import arguments, emit, interleaved, median, quantile, say

from agentkv.budget.bill import Bill
from agentkv.budget.facts import ContextFact, Fact, ModelCall, MoveFact, TaskFact, ToolCallFact
from agentkv.budget.ledger import Ledger
from agentkv.budget.store import Store
from agentkv.core.usage import Timing, Usage

RATE = 20_000
BURST = 100
STRETCH = 50_000
BACKLOG = 50_000


def event(rng: random.Random, task: str, number: int) -> Fact:
    """One fact of the mix that a busy agent leaves."""
    kind = rng.random()
    session, at_ms = f"{task}:coder", 1_700_000_000_000 + number
    if kind < 0.4:
        usage = Usage(input_tokens=18_231 + number % 977, cached_tokens=17_000, output_tokens=311, calls=1)
        return ModelCall(
            task=task, session=session, node="coder", branch="b1", at_ms=at_ms, model="a-model", usage=usage,
            timing=Timing(queued_s=0.01, prefill_s=0.31, decode_s=4.2, ttft_s=0.4, total_s=4.61),
            cost_usd=Decimal("0.012345"), price="2026-01/a-model", cached_by={"device": 17_000},
        )  # fmt: skip
    if kind < 0.6:
        return ToolCallFact(
            task=task, session=session, node="coder", tool="bash", command="pytest", at_ms=at_ms,
            predicted_p10_s=0.8, predicted_p50_s=2.5, predicted_p90_s=9.75, actual_s=3.21,
        )  # fmt: skip
    if kind < 0.9:
        return MoveFact(
            task=task, session=session, at_ms=at_ms, action="demote", to="host", blocks=311, size_bytes=114_688_000,
            seconds=0.021, reason="expected wait 7.1 s, restore 21 ms",
        )  # fmt: skip
    return ContextFact(
        task=task, session=session, at_ms=at_ms, event="slim", name="bash", cause="log", before_tokens=4_311,
        after_tokens=402,
    )  # fmt: skip


def sustained(ledger: Ledger, store: Store, events: int, rng: random.Random) -> float:
    """Events per second, the median over stretches: an append waits for the disk here, so that the disk decides."""
    tasks = [f"run-{number}" for number in range(1000)]
    facts = [event(rng, rng.choice(tasks), number) for number in range(10_000)]  # made before, and used again
    rates = []
    start_s = time.perf_counter()
    for number in range(events):
        ledger.append(facts[number % len(facts)])
        while number % 1000 == 0 and store.unsaved > BACKLOG:
            time.sleep(0.001)
        if number % STRETCH == STRETCH - 1:
            now_s = time.perf_counter()
            rates.append(STRETCH / (now_s - start_s))
            start_s = now_s
    store.flush(300)
    return median(rates[1:] or rates)  # in the first one memory still filled


def paced(ledger: Ledger, seconds: float, rng: random.Random) -> list[float]:
    """Microseconds per append of each burst, at RATE."""
    facts = [event(rng, f"paced-{number % 50}", number) for number in range(5_000)]
    costs = []
    start_s = time.perf_counter()
    for burst in range(int(seconds * RATE / BURST)):
        time.sleep(max(0.0, start_s + burst * BURST / RATE - time.perf_counter()))
        before_s = time.perf_counter()
        for number in range(BURST):
            ledger.append(facts[(burst * BURST + number) % len(facts)])
        costs.append((time.perf_counter() - before_s) / BURST * 1e6)
    return costs


def bill_ms(url: str, task: str, events: int) -> float:
    """Milliseconds to open, read and add up."""
    start_s = time.perf_counter()
    store = Store(url, create=False)
    facts = store.load(task)
    bill = Bill.from_facts(task, facts)
    took_s = time.perf_counter() - start_s
    store.close()
    assert (events, True) == (len(facts), bill.usage.calls > events // 4)
    return took_s * 1000


def one_task(url: str, events: int, rng: random.Random) -> None:
    """A task of `events` events, the last in the file."""
    store = Store(url)
    ledger = Ledger(store)
    ledger.append(TaskFact(task="billed"))
    for number in range(events - 2):
        ledger.append(event(rng, "billed", number))
    ledger.append(TaskFact(task="billed", event="finished"))
    ledger.close()


def main() -> None:
    args = arguments(
        __doc__.partition("\n")[0],
        events=(int, 1_000_000, "events in the large file"),
        seconds=(float, 4.0, "of steady load"),
        repeats=(int, 9, "bills of each kind"),
    )
    rng = random.Random(7)  # noqa: S311 - the same mix every time
    with tempfile.TemporaryDirectory() as folder:
        large, small = (f"sqlite:///{Path(folder) / name}.sqlite" for name in ("large", "small"))
        store = Store(f"sqlite:///{Path(folder) / 'paced.sqlite'}")
        costs = paced(Ledger(store), args.seconds, rng)
        store.close()
        say(args, f"append: {median(costs):.1f} us at the median, {quantile(costs, 0.99):.1f} us at p99 of bursts")
        store = Store(large)
        events_per_s = sustained(Ledger(store), store, args.events, rng)
        lost = store.unsaved
        store.close()
        say(
            args,
            f"{args.events:,} events: {events_per_s:,.0f} a second, {Path(folder, 'large.sqlite').stat().st_size:,} bytes",
        )
        one_task(large, 10_000, rng)
        one_task(small, 10_000, rng)
        sides = {name: partial(bill_ms, url, "billed", 10_000) for name, url in (("small", small), ("large", large))}
        bills = interleaved(sides, args.repeats)
        emit(
            args,
            {
                "events_per_s": round(events_per_s),
                "append_us": round(sum(costs) / len(costs), 2),
                "append_median_us": round(median(costs), 2),
                "append_p99_us": round(quantile(costs, 0.99), 2),
                "bill_10k_ms": round(min(bills["small"]), 1),
                "bill_1m_ms": round(min(bills["large"]), 1),
                "lost": lost,
                "bytes_per_event": round(Path(folder, "large.sqlite").stat().st_size / args.events),
            },
        )


if __name__ == "__main__":
    main()
