"""Budgets under load: what many branches overspend (nothing), and what a reservation costs here and across processes.

`overspend` is the most calls beyond a budget for 30 that 200 branches made in any round: threads and coroutines of four
processes in a shared budget, and threads and coroutines of this process in one of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import arguments, emit, quantile, say

from agentkv.budget.account import Account
from agentkv.budget.database import Database, sqlite_url
from agentkv.budget.limits import Budget
from agentkv.budget.shared import SharedPurses
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded

PROCESSES = 4
BRANCHES = 200
CALLS = 30
TOKENS = 100
SPAWN = multiprocessing.get_context("spawn")


def branch(account: Account) -> int:
    """One branch: a call of 100 tokens, if there is room; how many were made."""
    try:
        reservation = account.reserve(TOKENS)
    except BudgetExceeded:
        return 0
    reservation.settle(Usage(input_tokens=TOKENS, calls=1))
    return 1


def branches(account: Account, number: int) -> int:
    """So many branches at once, half of them threads, half of them coroutines of an event loop beside these."""
    made: list[int] = []
    threads = [threading.Thread(target=lambda: made.append(branch(account))) for _ in range(number // 2)]
    for thread in threads:
        thread.start()

    async def coroutine() -> int:
        await asyncio.sleep(0)
        return branch(account)

    async def coroutines() -> list[int]:
        return list(await asyncio.gather(*(coroutine() for _ in range(number - number // 2))))

    made += asyncio.run(coroutines())
    for thread in threads:
        thread.join()
    return sum(made)


def worker(url: str, jobs: Any, results: Any) -> None:
    """A process that plays its share of each round, then times calls one after the other."""
    database = Database(url, create=True)
    purses = SharedPurses(database)
    for kind, task, number in iter(jobs.get, None):
        calls = TOKENS * CALLS if kind == "round" else 10**12
        account = Account(task, purse=purses.of(task, Budget(tokens=calls, shared=True)))
        if kind == "round":
            results.put(branches(account, number))
            continue
        times = []
        for _ in range(number):
            started = time.perf_counter()
            branch(account)
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.002)  # an agent that only reserves is none; four of them still meet all the time
        results.put(times)
    purses.close()
    database.close()


def overspent(rounds: int) -> int:
    """Calls beyond the budget in the worst round of this process alone."""
    worst = 0
    for _ in range(rounds):
        account = Account("t", Budget(tokens=TOKENS * CALLS))
        made = branches(account, BRANCHES)
        account.check()
        worst = max(worst, made - CALLS, account.used.tokens // TOKENS - CALLS)
    return worst


def across_processes(rounds: int, calls: int) -> tuple[int, list[float]]:
    """Calls beyond the budget in the worst round of four processes, and what a reservation with its end took, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        url = sqlite_url(Path(folder) / "ledger.sqlite")
        jobs, results = [SPAWN.Queue() for _ in range(PROCESSES)], SPAWN.Queue()
        workers = [SPAWN.Process(target=worker, args=(url, queue, results)) for queue in jobs]
        for process in workers:
            process.start()
        worst = 0
        for number in range(rounds):
            for queue in jobs:
                queue.put(("round", f"round-{number}", BRANCHES // PROCESSES))
            worst = max(worst, sum(results.get(timeout=120) for _ in workers) - CALLS)
        for queue in jobs:
            queue.put(("time", "time", calls))
        times = [took for _ in workers for took in results.get(timeout=300)]
        for queue in jobs:
            queue.put(None)
        for process in workers:
            process.join()
    return worst, times


def per_call_us(calls: int) -> float:
    account = Account("t", Budget(tokens=10**12, usd=10**6))
    usage = Usage(input_tokens=TOKENS, calls=1)
    started = time.perf_counter()
    for _ in range(calls):
        account.reserve(TOKENS).settle(usage)
    return (time.perf_counter() - started) / calls * 1e6


def main() -> None:
    args = arguments(
        "Overspend under concurrency, and the cost of a reservation.",
        rounds=(int, 100, "rounds of 200 branches, here and across processes"),
        calls=(int, 1000, "timed calls of each process"),
    )
    here = overspent(args.rounds)
    there, times = across_processes(args.rounds, args.calls)
    own = statistics.median(per_call_us(5000) for _ in range(5))
    figures = {
        "overspend": max(here, there),
        "reserve_settle_us": round(own, 2),
        "reserve_settle_sqlite_ms": round(statistics.median(times), 3),
        "reserve_settle_sqlite_p99_ms": round(quantile(times, 0.99), 3),
    }
    say(args, f"{BRANCHES} branches, a budget for {CALLS} calls, {args.rounds} rounds: {figures['overspend']} too many")
    say(args, f"reserve and settle: {own:.1f} us here, {statistics.median(times):.2f} ms on SQLite with 4 processes")
    emit(args, figures)


if __name__ == "__main__":
    main()
