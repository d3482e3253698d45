"""Made-up traces with the published marginals of coding agents, the same for the same seed."""

from __future__ import annotations

import math
import random

from agentkv.sim.trace import Skips, Trace, Wait


def synthetic(*, seed: int = 0, sessions: int = 200, tools: bool = True, humans: bool = True) -> Trace:
    """First form: to be replaced by the calibrated generator with the same call."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    made = []
    for index in range(sessions):
        context, start_s, waits = round(rng.lognormvariate(math.log(40_000), 0.5)), 5.0, []
        for step in range(max(2, round(rng.lognormvariate(math.log(30), 1.0)))):
            human = humans and (rng.random() < 0.13 or not tools)  # noqa: PLR2004 - goes with the first form
            output = round(rng.lognormvariate(math.log(250), 0.9)) + 1
            new = output + round(rng.lognormvariate(math.log(500), 1.2))
            duration_s = rng.lognormvariate(math.log(127 if human else 2), 1.9 if human else 1.8)
            waits.append(
                Wait(
                    session=f"s{index:04d}", step=step, kind="human" if human else "tool",
                    tool="" if human else "bash", command="" if human else rng.choice(("pytest", "ls", "git diff")),
                    start_s=start_s, duration_s=duration_s, prompt_tokens=context, output_tokens=output,
                    next_prompt_tokens=context + new, reuse_tokens=context, llm_s=output / 60 + 1,
                )
            )  # fmt: skip
            start_s += duration_s + output / 60 + 1
            context += new
        made.append(tuple(waits))
    n = sum(len(waits) for waits in made)
    return Trace(sessions=tuple(made), skipped=Skips(records=n, used=n), source=f"synthetic seed {seed}")
