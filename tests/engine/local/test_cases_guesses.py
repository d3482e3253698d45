"""Guessing ahead must change nothing that anybody can see, whatever else a call asks for and whatever model it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, ToolChoice
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.errors import ModelError
from agentkv.kv.streams.adversarial import AdversarialStreams

LOG = "FAILED test_a - got 1\nFAILED test_b - got 2\nFAILED test_c - got 3\nFAILED test_d - "
FEW = tuple((ord(letter) - 33, 60.0) for letter in "abc")
LIST = {"type": "array", "items": {"enum": ["abab", "caca", "abba"]}, "minItems": 3, "maxItems": 8}
PUT = ToolSpec(
    name="put",
    strict=True,
    parameters={"type": "object", "properties": {"v": LIST, "w": {"type": "string", "maxLength": 9}}},
)


def _request(number):
    """One of many kinds of call; the same number gives the same one."""
    dice = random.Random(number)
    text = f"{dice.randrange(4)} {LOG * dice.randrange(1, 3)}"
    sampling = Sampling(
        max_tokens=dice.choice([1, 2, 17, 40, 70]), seed=dice.randrange(99), temperature=dice.choice([0.0, 0.0, 0.5, 1.3]),
        top_p=dice.choice([1.0, 0.9, 0.3]), logit_bias=dice.choice([FEW, FEW, (), ((257, -100.0), *FEW)]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.4]), presence_penalty=dice.choice([0.0, -0.5]),
        stop=dice.choice([(), (), ("abc",), ("ca", "bb")]),
    )  # fmt: skip
    kinds = [
        {}, {"response_format": ResponseFormat(schema=LIST)}, {"response_format": ResponseFormat()},
        {"tools": (PUT,), "tool_choice": ToolChoice(mode="required", parallel=dice.random() < 0.5)}, {"tools": (PUT,)},
        {"tools": (replace(PUT, strict=False),)},
    ]  # fmt: skip
    more = dice.choice(kinds) | {"n": dice.choice([1, 1, 3]), "logprobs": dice.choice([None, 0, 2])}
    turns = (Message(role="user", content=text),)
    return Request(messages=turns, sampling=sampling, caller=Caller(task=f"t{number}"), **more)


def _told(stream):
    """Everything that a caller can see of an answer, but ids of calls."""
    try:
        answer = stream.result(60)
    except ModelError as error:
        return str(error)
    return [
        (
            choice.text, choice.raw, choice.token_ids, choice.finish_reason, [(c.name, c.arguments) for c in choice.tool_calls],
            [(entry.token_id, entry.raw, round(entry.logprob, 2), len(entry.top)) for entry in choice.logprobs],
        )
        for choice in answer.choices
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_is_asked_guesses_change_nothing_of_the_answer(start, seed):
    """Formats, calls, choices, penalties, biases, seeds, stops, log probabilities; eight at once over a pool that is short."""
    eager = start(blocks=70, host=90, streams=AdversarialStreams(seed))
    plain = start(blocks=300, speculate=False)
    for first in range(seed * 1000, seed * 1000 + 56, 8):
        requests = [_request(number) for number in range(first, first + 8)]
        streams = [eager.submit(request) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            assert _told(plain.submit(request)) == _told(stream), request
    stats = eager.stats()
    assert 20 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gpt-oss", "qwen2-window", "smollm3"])
def test_guesses_across_windows_are_judged_by_the_right_scores(models, tmp_path, family, ask):
    """Windows of 32 tokens, answers of 70 that cross them: the tokens are transformers' own."""
    folder = models.save(tmp_path, family)
    loaded, oracle = load_model(str(folder), device="cpu", dtype="float32"), models.Oracle(folder)
    silent = tuple((id_, -100.0) for id_ in range(257) if id_ not in {ord(letter) - 33 for letter in "abc"})
    prompt = "abcabcabcabc " * 2
    ids, wanted = list(loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]), []
    allowed = [ord(letter) - 33 for letter in "abc"]
    with LocalEngine(loaded, device_memory=64 * loaded.geometry.block_bytes) as engine:
        sampling = Sampling(max_tokens=70, logit_bias=(*silent, (257, -100.0), (258, -100.0)))
        told = engine.submit(ask(prompt, sampling=sampling)).result(60)
    for _ in range(70):
        scores = oracle.logits([*ids, *wanted])[-1]
        wanted.append(max(allowed, key=lambda id_: float(scores[id_])))
    assert wanted == list(told.token_ids)
    assert told.accepted_tokens
