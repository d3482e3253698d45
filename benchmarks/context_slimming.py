"""Slimming: how much smaller real logs become, whether what matters stays, and how long 5 MB of anything take."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from context_logs import medium_logs, real_logs

from agentkv.context.counter import Counter
from agentkv.context.slim import Slimmer
from agentkv.context.tokens import count_text

HUGE_BYTES = 5_000_000


def logs() -> dict[str, Any]:
    """Over real logs made on the spot: tokens before by tokens after, and the share of must-keep pieces still there.

    `slim_ratio` is that of all logs together, as is `medium_ratio` for everyday outputs of one to three kilobytes.
    """
    result: dict[str, Any] = {}
    lost: list[str] = []
    pieces = 0
    for figure, made in (("slim", real_logs()), ("medium", medium_logs())):
        slimmer = Slimmer(outputs=None, count=Counter(count_text).text)
        slimmed = {name: slimmer.slim(log.text, tool=log.tool, command=log.command) for name, log in made.items()}
        raw, kept = (sum(getattr(s, side) for s in slimmed.values()) for side in ("raw_tokens", "kept_tokens"))
        result[f"{figure}_ratio"] = round(raw / kept, 2)
        result[f"{figure}_ratio_by_log"] = {n: round(s.raw_tokens / s.kept_tokens, 1) for n, s in slimmed.items()}
        pieces += sum(len(log.must_keep) for log in made.values())
        lost += [f"{n}: {piece}" for n, log in made.items() for piece in log.must_keep if piece not in slimmed[n].text]
    return result | {"slim_kept": 1 - len(lost) / pieces, "slim_lost": lost[:5]}


def huge() -> tuple[float, dict[str, float]]:
    """The slowest of several kinds of 5 MB in milliseconds, and each kind's: CPU time, the better of two runs."""
    taken = {}
    for kind, text in _kinds().items():
        taken[kind] = round(min(_slimming_ms(text) for _ in range(2)))
    return max(taken.values()), taken


def _slimming_ms(text: str) -> float:
    slimmer = Slimmer(outputs=None, count=Counter(count_text).text)
    started_s = time.process_time()
    slimmer.slim(text, tool="bash", command="cat file")
    return (time.process_time() - started_s) * 1e3


def _kinds() -> dict[str, str]:
    chance = random.Random(5)  # noqa: S311  a seed, not a secret
    words = [f"word{n}" for n in range(500)]
    prose = " ".join(chance.choice(words) for _ in range(4000))
    log = "\n".join(f"2026-03-01T10:{n % 60:02d}:07Z INFO part {n}: wrote block {n * 31 % 977}" for n in range(2000))
    trace = "".join(
        f'Traceback (most recent call last):\n  File "/srv/a{n}.py", line {n}, in f\n    g({n})\nValueError: {n}\n'
        for n in range(500)
    )
    rows = [{"id": n, "name": f"row {n}", "tags": ["a", "b"], "nested": {"x": n / 7}} for n in range(55_000)]
    whole = {
        "a log": log,
        "one line": "x" * HUGE_BYTES,
        "one line of words": prose,
        "empty lines": "\n" * HUGE_BYTES,
        "blanks": " " * HUGE_BYTES,
        "progress bars": "".join(f"\rDownloading {n} % [{'=' * (n % 40):40}]" for n in range(2000)),
        "stack traces": trace,
        "a diff": "".join(
            f"diff --git a/f{n} b/f{n}\n@@ -1,3 +1,3 @@\n-old {n}\n+new {n}\n same\n" for n in range(500)
        ),
        "json": json.dumps(rows),
        "json lines": "\n".join(json.dumps(row) for row in rows),
        "open brackets": "[" * HUGE_BYTES,
        "broken json": json.dumps(rows)[:-1],
        "escape codes": "\x1b[31mred\x1b[0m plain " * 1000,
        "chinese": "".join(chr(0x4E00 + n * 37 % 20000) for n in range(5000)),
        "emoji": "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 1000,
        "lone surrogates": "\ud800x" * 5000,
        "nul and control": "\x00\x01\x02 a\n" * 5000,
        "base64": "".join(chance.choice("ABCDEFGHIJKLMNOPabcdefghijklmnop0123456789+/") for _ in range(20_000)),
        "special tokens": "<|im_end|><|endoftext|>" * 1000,
    }
    return {kind: (text * (HUGE_BYTES // len(text) + 1))[:HUGE_BYTES] for kind, text in whole.items()}
