"""The embedded engine against `transformers` generate: same weights, same prompts, same process, interleaved.

Decode and prefill of a single session; four sessions together against four runs of generate one after another, once
in the decode phase over a context of 512 tokens (their prompts are in the cache, as an agent's are) and once over whole
calls with cold prompts, whose prefill does not batch; and in fp32 the tokens themselves. Then what it writes
(engine_writing.py) and the same weights under llama.cpp (engine_llamacpp.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from common import a_over_a, arguments, emit, interleaved, median, say
from engine_llamacpp import against_llamacpp
from engine_writing import formats, speculation
from transformers import AutoModelForCausalLM
from workload import engine, loaded, text_of

from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.loader import LoadedModel
from agentkv.policy.cost import kv_bytes_per_token

DECODE_CONTEXT, DECODE_TOKENS, PREFILL_TOKENS = 512, 64, 4096


def reference(model: LoadedModel, folder: Path) -> Any:
    """The same weights as a plain transformers model with its own best attention (sdpa)."""
    dtype = getattr(torch, model.geometry.dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


@torch.inference_mode()
def hf_generate(hf: Any, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Greedy generate; (new ids, seconds)."""
    started = time.perf_counter()
    output = hf.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return output[0, len(ids) :].tolist(), time.perf_counter() - started


def speed(model: LoadedModel, hf: Any, repeats: int) -> dict[str, float]:
    """Ratios of speed, ours over theirs."""
    encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731  a shorthand
    decode_texts = [text_of(model.tokenizer, DECODE_CONTEXT, seed=n) for n in range(4)]
    prefill_text = text_of(model.tokenizer, PREFILL_TOKENS, seed=5)
    forced = [tuple(hf_generate(hf, encode(text), DECODE_TOKENS)[0]) for text in decode_texts]

    with engine(model, device_mib=512, host_mib=64) as kv:
        number = 0

        def ask(texts: list[str], forced_ids: list[tuple[int, ...]]) -> tuple[list[Any], float]:
            nonlocal number
            started = time.perf_counter()
            streams = []
            for text, ids in zip(texts, forced_ids, strict=True):
                number += 1
                streams.append(kv.submit(Request(prompt=text, caller=Caller(task=f"t{number}"), forced_ids=ids)))
            answers = [stream.result(300) for stream in streams]
            passed = time.perf_counter() - started
            for answer in answers:
                kv.finish_task(answer.session.rpartition("#")[0])
            return answers, passed

        def ours_decode() -> float:
            (answer,), _ = ask(decode_texts[:1], forced[:1])
            return (DECODE_TOKENS - 1) / answer.timing.decode_s

        def hf_decode() -> float:
            ids = encode(decode_texts[0])
            return (DECODE_TOKENS - 1) / (hf_generate(hf, ids, DECODE_TOKENS)[1] - hf_generate(hf, ids, 1)[1])

        def hf_serial_decode() -> float:
            longer = [hf_generate(hf, encode(text), DECODE_TOKENS + 1)[1] for text in decode_texts]
            return sum(longer) - sum(hf_generate(hf, encode(text), 1)[1] for text in decode_texts)

        def ours_four_warm() -> float:
            kept = [Request(prompt=text, caller=Caller(task="kept"), forced_ids=(198,)) for text in decode_texts]
            for request in kept:
                kv.submit(request).result(300)
            passed = ask(decode_texts, forced)[1]
            kv.finish_task("kept")
            return passed

        sides = {
            "ours_decode": ours_decode,
            "hf_decode": hf_decode,
            "ours_prefill": lambda: PREFILL_TOKENS / ask([prefill_text], [(198,)])[0][0].timing.ttft_s,
            "hf_prefill": lambda: PREFILL_TOKENS / hf_generate(hf, encode(prefill_text), 1)[1],
            "ours_four": ours_four_warm,
            "hf_four": hf_serial_decode,
            "ours_four_cold": lambda: ask(decode_texts, forced)[1],
            "hf_four_cold": lambda: sum(hf_generate(hf, encode(text), DECODE_TOKENS)[1] for text in decode_texts),
        }
        for side in sides.values():
            side()
        runs = interleaved(sides, repeats)
    middle = {name: median(values) for name, values in runs.items()}
    return {
        "decode_vs_hf": round(middle["ours_decode"] / middle["hf_decode"], 3),
        "prefill_vs_hf": round(middle["ours_prefill"] / middle["hf_prefill"], 3),
        "batch4_vs_serial_hf": round(middle["hf_four"] / middle["ours_four"], 2),
        "batch4_cold_calls_vs_serial_hf": round(middle["hf_four_cold"] / middle["ours_four_cold"], 2),
        "a_over_a": round(a_over_a(runs["hf_four"]), 3),
        "decode_tokens_s": round(middle["ours_decode"], 1),
        "decode_tokens_s_hf": round(middle["hf_decode"], 1),
        "prefill_tokens_s": round(middle["ours_prefill"]),
        "prefill_tokens_s_hf": round(middle["hf_prefill"]),
        "four_tokens_s": round(4 * DECODE_TOKENS / middle["ours_four"], 1),
    }


def same_tokens(model: LoadedModel, hf: Any) -> bool:
    """fp32 greedy, four sessions at once with prompts of different lengths, against generate."""
    lengths = (37, 300, 641, 1100)
    texts = [text_of(model.tokenizer, length, seed=length) for length in lengths]
    expected = [hf_generate(hf, model.tokenizer.encode(text, add_special_tokens=False), 32)[0] for text in texts]
    with engine(model, device_mib=256, host_mib=64) as kv:
        streams = [
            kv.submit(Request(prompt=text, caller=Caller(task=f"t{n}"), sampling=Sampling(max_tokens=32)))
            for n, text in enumerate(texts)
        ]
        answers = [list(stream.result(300).token_ids) for stream in streams]
    # Ours stops at an end token, min_new_tokens forbids it: compare up to the first end token.
    return (
        all(ours == theirs[: len(ours)] for ours, theirs in zip(answers, expected, strict=True))
        and min(map(len, answers)) > 1
    )


def main() -> None:
    args = arguments(__doc__ or "", repeats=(int, 5, "rounds"), schemas=(int, 200, "random schemas"))
    from agentkv.engine.local.convert import cache_folder
    from agentkv.engine.local.loader import folder_of

    folder = Path(folder_of("smollm2-135m", lambda _line: None))
    assert folder.is_relative_to(cache_folder())
    say(args, "fp32 tokens ...")
    exact = loaded("float32")
    equal = same_tokens(exact, reference(exact, folder))
    say(args, "speed ...")
    model = loaded()
    geometry = model.geometry
    formula = kv_bytes_per_token(
        layers=geometry.layers, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype_bytes=2
    )
    emit(
        args,
        {
            **speed(model, reference(model, folder), args.repeats),
            **speculation(model, args.repeats, lambda line: say(args, line)),
            **formats(model, args.schemas, args.repeats, lambda line: say(args, line)),
            **against_llamacpp(model, args.repeats, torch.get_num_threads(), lambda line: say(args, line)),
            "tokens_equal_hf": equal,
            "kv_bytes_per_token": geometry.token_bytes,
            "kv_bytes_per_token_formula": formula,
            "dtype": geometry.dtype,
        },
    )


if __name__ == "__main__":
    main()
