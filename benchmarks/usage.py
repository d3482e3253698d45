"""Is the bill right? A scripted OpenAI-compatible server plays how servers report usage; the bill must be its truth.

`behaviours` counts what is played (streams of every kind, providers, retries, failures after the answer began, cached,
reasoning and tiers), `exact` those whose bill is right to the token and the last digit of the price.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

from common import arguments, emit, say
from usage_behaviours import BEHAVIOURS, play


def main() -> None:
    args = arguments(__doc__ or "")
    os.environ.pop("OPENAI_API_KEY", None)
    exact = tokens = 0
    wrong = []
    for behaviour in BEHAVIOURS:
        try:
            bill, truth = play(behaviour)
        except Exception as error:
            bill, truth = [], [repr(error)]
        if bill == truth:
            exact += 1
            tokens += sum(usage.total_tokens for usage, *_ in bill)
        else:
            wrong.append(behaviour.name)
            say(args, f"{behaviour.name}\n  the truth {truth}\n  the bill  {bill}")
    emit(args, {"behaviours": len(BEHAVIOURS), "exact": exact / len(BEHAVIOURS), "wrong": wrong, "tokens": tokens})


if __name__ == "__main__":
    main()
