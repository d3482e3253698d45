"""The embedded engine against llama.cpp's server on the same weights: ours in bfloat16, theirs in the file's own Q4_1.

Used by engine.py. Prefill of one cold prompt, and decode at 1, 4 and 8 calls at once behind prompts that are in the cache,
as each side reports it; interleaved, with the same number of threads.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from common import a_over_a, interleaved, median
from workload import engine, text_of

from agentkv.core.task import Caller
from agentkv.engine.base import Generation, Request, Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

PREFILL_TOKENS, CONTEXT, WRITTEN = 2048, 512, 48
MOST = 8


class Sides:
    """Both, each asked in its own way."""

    def __init__(self, model: LoadedModel, http: httpx.Client, kv: LocalEngine) -> None:
        self._tokenizer = model.tokenizer
        self._http = http
        self._kv = kv
        self._numbers = itertools.count(100)
        self._texts = [text_of(model.tokenizer, CONTEXT, seed=n) for n in range(MOST)]

    def their_decode(self, at_once: int) -> float:
        """Tokens a second of all calls together."""
        with concurrent.futures.ThreadPoolExecutor(MOST) as pool:
            told = list(pool.map(lambda slot: self._theirs(self._texts[slot], WRITTEN, slot), range(at_once)))
        return at_once * WRITTEN / max(one["predicted_ms"] / 1000 for one in told)

    def their_prefill(self) -> float:
        """Tokens a second of a new prompt."""
        timings = self._theirs(self._new_text(), 1, MOST - 1)
        return timings["prompt_n"] / (timings["prompt_ms"] / 1000)

    def our_decode(self, at_once: int) -> float:
        """Tokens a second of all calls together."""
        texts = self._texts[:at_once]
        for text in texts:
            kept = Request(prompt=text, caller=Caller(task="kept"), sampling=Sampling(max_tokens=1))
            self._kv.submit(kept).result(600)
        told = self._ours(texts, WRITTEN)
        self._kv.finish_task("kept")
        return at_once * (WRITTEN - 1) / max(one.timing.decode_s for one in told)

    def our_prefill(self) -> float:
        """Tokens a second of a new prompt."""
        return PREFILL_TOKENS / self._ours([self._new_text()], 1)[0].timing.ttft_s

    def _new_text(self) -> str:
        return text_of(self._tokenizer, PREFILL_TOKENS, seed=next(self._numbers))

    def _theirs(self, text: str, count: int, slot: int) -> dict[str, float]:
        body = {
            "prompt": text, "n_predict": count, "id_slot": slot, "cache_prompt": True, "temperature": 0,
            "logit_bias": [[0, False], [2, False]],
        }  # fmt: skip
        timings: dict[str, float] = self._http.post("/completion", json=body).raise_for_status().json()["timings"]
        return timings

    def _ours(self, texts: list[str], count: int) -> list[Generation]:
        streams = []
        for text in texts:
            sampling = Sampling(max_tokens=count, logit_bias=((0, -100.0), (2, -100.0)))
            caller = Caller(task=f"t{next(self._numbers)}")
            streams.append(self._kv.submit(Request(prompt=text, caller=caller, sampling=sampling)))
        answers = [stream.result(600) for stream in streams]
        for answer in answers:
            self._kv.finish_task(answer.session.rpartition("#")[0])
        return answers


def against_llamacpp(model: LoadedModel, repeats: int, threads: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Ratios of speed, ours over theirs; {} with the reason under `left_out` where llama.cpp is missing."""
    import llamacpp

    if not llamacpp.installed():
        return {"left_out": {"llamacpp": "make engines ARGS='--only llamacpp' installs it"}}
    with (
        llamacpp.server(slots=MOST, tokens=PREFILL_TOKENS + 512, threads=threads) as url,
        httpx.Client(base_url=url.removesuffix("/v1"), timeout=600) as http,
        engine(model, device_mib=512, host_mib=64) as kv,
    ):
        both = Sides(model, http, kv)
        sides: dict[str, Callable[[], float]] = {"ours_prefill": both.our_prefill, "theirs_prefill": both.their_prefill}
        for count in (1, 4, MOST):
            sides[f"ours_{count}"] = partial(both.our_decode, count)
            sides[f"theirs_{count}"] = partial(both.their_decode, count)
        for side in sides.values():
            side()
        runs = interleaved(sides, repeats)
    middle = {name: median(values) for name, values in runs.items()}
    tell("  tokens/s: " + ", ".join(f"{name} {value:.0f}" for name, value in middle.items()))
    ratios = {
        f"decode_vs_llamacpp_b{count}": round(middle[f"ours_{count}"] / middle[f"theirs_{count}"], 3)
        for count in (1, 4, MOST)
    }
    return {
        "prefill_vs_llamacpp": round(middle["ours_prefill"] / middle["theirs_prefill"], 2),
        **ratios,
        "llamacpp_a_over_a": round(a_over_a(runs["theirs_4"]), 3),
    }
