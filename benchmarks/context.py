"""The context: what of a long tool loop has to be computed again, against doing nothing and against other packages.

Every contestant plays the same two recorded loops with the same fake model, and is measured on what reaches the model.
`--table` prints the comparison as markdown. The other packages come with the extra `bench`; those that are missing are
skipped and named. The embedded engine's part needs the real weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("LANGSMITH_TRACING", "false")

from common import emit, say
from context_brain import Run
from context_costs import layout_ms
from context_loops import Loop, loops
from context_ours import append_steps, ours
from context_rivals import runs
from context_slimming import huge, logs

NOTHING = "doing nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--table", action="store_true", help="print the comparison as markdown and nothing else")
    parser.add_argument("--quick", action="store_true", help="with --table: the 40-step loop alone")
    args = parser.parse_args()
    say(_quiet(args), "recording the loops: the commands really run ...")
    played = loops()
    if args.table:
        for loop in played[: 1 if args.quick else 2]:
            print(table(loop, compared(loop)))
        return
    short, long = played
    say(args, "driving everybody through the 40-step loop ...")
    first = compared(short)
    say(args, "and through the 120-step loop ...")
    second = compared(long)
    say(args, "append steps on the embedded engine ...")
    result: dict[str, Any] = {**append_steps(short), **figures(first, second)}
    say(args, "slimming ...")
    result |= logs()
    result["huge_ms"], result["huge_ms_by_kind"] = huge()
    say(args, "layout and counting ...")
    for messages in (100, 200, 1_000, 10_000):
        result[f"layout_ms_{messages}"] = round(layout_ms(short, messages), 3)
    emit(args, result)


def compared(loop: Loop) -> list[Run]:
    """Everybody's runs of one loop; ours in two settings."""
    return [*runs(loop), ours(loop, "off"), ours(loop, "defaults"), ours(loop, "for this loop")]


def figures(short: list[Run], long: list[Run]) -> dict[str, Any]:
    """The numbers that have a bar, each the worse of the two loops, and what they were made of."""
    result: dict[str, Any] = {}
    for name, all_runs in (("40", short), ("120", long)):
        mine = _mine(all_runs)
        nothing = next(run for run in all_runs if run.name == NOTHING)
        best, shorter = _best(all_runs, nothing, shortening=False), _best(all_runs, nothing, shortening=True)
        result |= {
            f"uncached_{name}": mine.uncached_tokens,
            f"peak_tokens_{name}": mine.peak_tokens,
            f"folds_{name}": mine.summaries,
            f"looked_up_{name}": mine.looked_up,
            f"valid_{name}": not mine.problems and mine.request_kept,
            f"best_rival_{name}": f"{best.name}, {best.setting}: {best.uncached_tokens}",
            f"best_shortening_rival_{name}": f"{shorter.name}, {shorter.setting}: {shorter.uncached_tokens}",
            f"uncached_vs_any_{name}": round(mine.uncached_tokens / best.uncached_tokens, 3),
            f"uncached_vs_shortening_{name}": round(mine.uncached_tokens / shorter.uncached_tokens, 3),
            f"peak_vs_nothing_{name}": round(mine.peak_tokens / nothing.peak_tokens, 3),
            f"facts_{name}": mine.facts,
        }
    result["skipped"] = sorted({f"{run.name}: {run.skipped}" for run in short + long if run.skipped})
    result["uncached_vs_best_rival"] = max(result["uncached_vs_any_40"], result["uncached_vs_any_120"])
    result["peak_vs_nothing"] = max(result["peak_vs_nothing_40"], result["peak_vs_nothing_120"])
    result["facts_kept"] = min(result["facts_40"], result["facts_120"])
    return result


def _mine(all_runs: list[Run]) -> Run:
    return next(run for run in all_runs if run.name == "agentkv" and run.setting == "for this loop")


def _best(all_runs: list[Run], nothing: Run, *, shortening: bool) -> Run:
    """The rival that computes least, of those that kept the facts with valid requests and few extra calls.

    With `shortening`, only those whose largest request is at most half of doing nothing's.
    """
    good = [run for run in all_runs if run.usable and run.name != "agentkv"]
    if shortening:
        good = [run for run in good if run.peak_tokens <= 0.5 * nothing.peak_tokens] or good
    return min(good, key=lambda run: run.uncached_tokens)


def table(loop: Loop, all_runs: list[Run]) -> str:
    """One loop's comparison as a markdown table."""
    head = (
        "| who | setting | uncached tokens | largest request | prefix hit | breaks | summary calls | looked up again "
        "| facts kept | requests |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---|"
    )
    rows = [f"**{loop.name}**, outputs of {loop.mean_output_chars} characters on average\n\n{head}"]
    for run in all_runs:
        if run.skipped:
            rows.append(f"| {run.name} | {run.setting} | skipped: {run.skipped} | | | | | | | |")
            continue
        notes = [*run.problems] + ([] if run.request_kept else ["the user's request is not in all of them"])
        rows.append(
            f"| {run.name} | {run.setting} | {run.uncached_tokens:,} | {run.peak_tokens:,} | {run.hit:.1%} | {run.breaks} "
            f"| {run.summaries} | {run.looked_up} | {run.facts:.0%} | {'; '.join(notes) or 'valid'} |"
        )
    return "\n".join(rows) + "\n"


def _quiet(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(json=args.json or args.table)


if __name__ == "__main__":
    sys.exit(main())
