"""What the engine writes: guesses that pay, JSON that is valid, against llama.cpp on the same weights.

Used by engine.py. Speculation: the same requests with and without, interleaved, decode time per token: answers that
repeat what stands in real logs and files of this repository, and answers that repeat nothing. Formats: random bounded
schemas, each answer parsed and validated; their price is a step's with a grammar over one without.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jsonschema
import torch
from common import a_over_a, interleaved, median

from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Generation, Request, ResponseFormat, Sampling
from agentkv.engine.local.drafts import Drafter
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel
from agentkv.engine.local.runner import Runner, Span
from agentkv.kv.geometry import BLOCK_TOKENS

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
WRITTEN = 96
_LONGEST = 512
_ROWS, _STEPS = 5, 40


def logs() -> dict[str, str]:
    """What an agent on this repository reads and then writes about: a linter's findings, a test run, a file."""
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "ALL", "--isolated", "--no-cache", "--output-format"]
    findings = subprocess.run(
        [*ruff, "concise", "agentkv/units.py", "agentkv/clock.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", "tests/test_units.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    code = (ROOT / "agentkv/units.py").read_text(encoding="utf-8")
    return {
        "findings": f"{findings[:2400]}\n\nRepeat the findings above, one per line.",
        "tests": f"{tests[-2400:]}\n\nList the tests above with their outcome.",
        "file": f"{code[:2400]}\n\nWrite the file above again.",
    }


PROSE = {
    "story": "Tell me a story about a lighthouse keeper.",
    "letter": "Write a letter to a friend about the sea.",
    "plan": "What would you cook for six people who like fish?",
}


class Pair:
    """Two engines over one model, with guesses and without."""

    def __init__(self, model: LoadedModel) -> None:
        self.sides = {
            name: LocalEngine(model, device_memory=256 * MIB, speculate=name == "guessing")
            for name in ("guessing", "plain")
        }
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for side in self.sides.values():
            side.close()

    def ask(self, side: str, text: str, sampling: Sampling, **more: Any) -> Generation:
        """One call of a task of its own."""
        self._number += 1
        task = f"t{self._number}"
        engine = self.sides[side]
        request = Request(
            messages=(Message(role="user", content=text),), sampling=sampling, caller=Caller(task=task), **more
        )
        answer = engine.submit(request).result(300)
        engine.finish_task(task)
        return answer


def speculation(model: LoadedModel, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`speculation_gain`: decode speed with guesses over without, the median over logs. `speculation_worst`: the least
    over texts that repeat nothing, by what was done more: every step looks for a guess, and a wrong guess makes a step
    longer. Their runs are in `speculation_each` too, but two runs of the very same steps differ by more than what is
    asked here: on shared machines by a tenth (`speculation_worst_by_difference`).
    """
    gains: dict[str, float] = {}
    priced: dict[str, float] = {}
    look_s, step_s, row_s = _prices(model)
    noise: list[float] = []
    shares: dict[str, float] = {}
    with Pair(model) as pair:
        for name, text in {**logs(), **PROSE}.items():
            warm = Sampling(max_tokens=WRITTEN, temperature=0.0 if name not in PROSE else 1.0, seed=7)

            def each(side: str, text: str = text, warm: Sampling = warm, name: str = name) -> float:
                told = pair.ask(side, text, warm)
                if side == "guessing":
                    count = max(1, len(told.token_ids))
                    shares[name] = told.accepted_tokens / count
                    wrong = told.drafted_tokens - told.accepted_tokens
                    priced[name] = step_s / (step_s + look_s + row_s * wrong / count)
                return told.timing.decode_s / max(1, len(told.token_ids) - 1)

            sides = {"plain": lambda each=each: each("plain"), "guessing": lambda each=each: each("guessing")}
            for side in sides.values():
                side()
            runs = interleaved(sides, repeats)
            gains[name] = median([a / b for a, b in zip(runs["plain"], runs["guessing"], strict=True)])
            noise.append(a_over_a(runs["plain"]))
            tell(
                f"  {name}: {gains[name]:.2f}x, {shares[name]:.0%} of the tokens were guessed right; looking and wrong "
                f"guesses alone: {priced[name]:.3f}x"
            )
    return {
        "speculation_gain": round(median([gain for name, gain in gains.items() if name not in PROSE]), 3),
        "speculation_worst": round(min(priced[name] for name in PROSE), 3),
        "speculation_worst_by_difference": round(min(gain for name, gain in gains.items() if name in PROSE), 3),
        "speculation_look_us": round(look_s * 1e6, 1),
        "speculation_row_share": round(row_s / step_s, 3),
        "speculation_each": {name: round(gain, 2) for name, gain in gains.items()},
        "speculation_accepted": {name: round(share, 2) for name, share in shares.items()},
        "speculation_a_over_a": round(median(noise), 3),
    }


def _prices(model: LoadedModel) -> tuple[float, float, float]:
    """Seconds that looking for a guess takes, that a step does, and that each guessed token makes it longer."""
    geometry = model.geometry
    shape = (64, geometry.layers, 2, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
    runner = Runner(model.model, torch.zeros(shape, dtype=getattr(torch, geometry.dtype)), vocabulary=model.vocabulary)
    dice = random.Random(3)  # noqa: S311  not for secrets
    ids = [dice.randrange(model.vocabulary) for _ in range(512)]

    def step(rows: int) -> float:
        span = Span(token_ids=[5] * rows, start=512, blocks=list(range(1, 40)), sample=True, drafted=rows - 1)
        started = time.perf_counter()
        runner.forward([span])
        return time.perf_counter() - started

    def look() -> float:
        drafter = Drafter()
        started = time.perf_counter()
        drafter.draft(ids, 4)
        return time.perf_counter() - started

    for rows in (1, _ROWS):
        step(rows)
    runs = interleaved({"one": lambda: step(1), "more": lambda: step(_ROWS), "look": look}, _STEPS)
    one = median(runs["one"])
    runner.close()
    return median(runs["look"]), one, max(0.0, median(runs["more"]) - one) / (_ROWS - 1)


def random_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers cannot grow without bounds."""
    kinds = ["string", "integer", "boolean", "enum", "number", "null"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else dice.choice(kinds)
    if kind == "object":
        names = dice.sample(
            ["name", "path", "count", "ok", "reason", "items", "status", "lines", "owner"], dice.randint(1, 4)
        )
        return {
            "type": "object", "properties": {name: random_schema(dice, depth + 1) for name in names},
            "required": names, "additionalProperties": False,
        }  # fmt: skip
    if kind == "array":
        return {"type": "array", "items": random_schema(dice, depth + 1), "minItems": 1, "maxItems": dice.randint(1, 3)}
    return {
        "string": {"type": "string", "minLength": 1, "maxLength": dice.randint(4, 24)},
        "integer": {"type": "integer", "minimum": 0, "maximum": dice.choice([9, 100, 5000])},
        "number": {"type": "number", "minimum": 0, "maximum": 100},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": dice.sample(["low", "middle", "high", "none", "many"], 3)},
    }[kind]


def formats(model: LoadedModel, count: int, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`json_valid`: the share of answers that ended with "stop" and are valid; `json_ended`: the share that ended within
    512 tokens; `json_cost`: decode time per token with a grammar that allows everything, over one without any.
    """
    dice = random.Random(7)  # noqa: S311  not for secrets
    ended = valid = 0
    with Pair(model) as pair:
        for number in range(count):
            schema = random_schema(dice)
            sampling = Sampling(max_tokens=_LONGEST, temperature=0.0 if number % 2 else 0.8, seed=number)
            told = pair.ask(
                "plain", "Describe a job on a server as JSON.", sampling, response_format=ResponseFormat(schema=schema)
            )
            if told.finish_reason == "stop":
                ended += 1
                valid += _valid(told.text, schema)
        tell(f"  {ended} of {count} ended, {valid} of them valid")
        # the same tokens twice: what a grammar that always allows them costs
        text = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 4000}}, "required": ["text"]}
        sampling = Sampling(max_tokens=WRITTEN)
        sides = {
            "held": lambda: _per_token(
                pair.ask("plain", PROSE["story"], sampling, response_format=ResponseFormat(schema=text))
            ),
            "free": lambda: _per_token(pair.ask("plain", PROSE["story"], sampling)),
        }
        for side in sides.values():
            side()
        runs = interleaved(sides, repeats)
    return {
        "json_valid": round(valid / max(1, ended), 4),
        "json_ended": round(ended / count, 4),
        "json_cost": round(median(runs["held"]) / median(runs["free"]) - 1, 4),
        "json_cost_a_over_a": round(a_over_a(runs["free"]), 3),
    }


def _per_token(told: Generation) -> float:
    return told.timing.decode_s / max(1, len(told.token_ids) - 1)


def _valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
