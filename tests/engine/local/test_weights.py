"""The real model: its tokens are those of transformers, and its chats make sense to the transcripts."""

import pytest
import torch

from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smol():
    return load_model("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture
def engine(smol):
    with LocalEngine(smol, device_memory=200 << 20, host_memory=200 << 20, chunk_tokens=128) as made:
        yield made


def _ask(turns, task, count=24):
    return Request(messages=tuple(turns), sampling=Sampling(max_tokens=count), caller=Caller(task=task))


def test_float32_tokens_equal_transformers_in_a_crowd(smol, engine):
    """Three chats at once, prefilled in chunks between each other's tokens."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(smol.model.config._name_or_path or "", dtype=torch.float32).eval()
    log = "\n".join(f"line {i}: value {i * i % 97} ok" for i in range(30))
    chats = [
        [Message(role="user", content="Name three colours.")],
        [Message(role="system", content="Be brief."), Message(role="user", content=f"What is in this log?\n{log}")],
        [Message(role="user", content="Write a haiku about the sea, in Czech: žluťoučký kůň.")],
    ]
    streams = [engine.submit(_ask(chat, f"t{i}")) for i, chat in enumerate(chats)]
    for chat, stream in zip(chats, streams, strict=True):
        turns = [{"role": turn.role, "content": turn.content} for turn in chat]
        ids = smol.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        generation = stream.result(120)
        assert ids.shape[1] == generation.usage.input_tokens
        assert out[0, ids.shape[1] :].tolist() == list(generation.token_ids)


def test_an_agents_turns_reuse_their_own_answers(engine):
    """Chinese text, blank lines and tool results re-rendered by the template: every full block is found again."""
    turns = [Message(role="user", content="Explain 你好 and  ~2\n\nbriefly.")]
    known = 0
    for number in range(4):
        generation = engine.submit(_ask(turns, "agent", 30)).result(120)
        if number:
            assert known == generation.usage.cached_tokens
        known = generation.usage.input_tokens + generation.usage.output_tokens - 1
        turns += [
            Message(role="assistant", content=generation.raw),
            Message(role="tool", content=f"结果 {number}\n\n ok"),
        ]


def test_two_hundred_texts_come_back_from_the_tokenizer(smol, engine):
    """Accents, digits, emoji, double spaces and code: decoding what was encoded gives the text (M2)."""
    tokeniser = engine._intake.tokeniser
    for number in range(200):
        text = f"{'é' * (number % 3)} {number}  {number**3} 👩‍🔬{'  ' * (number % 4)}def f_{number}():\n\treturn '{chr(0x4E00 + number)}'"
        encoded = tokeniser.encode(text).ids
        assert text == tokeniser.decode(encoded)
        assert encoded == smol.tokenizer(text, add_special_tokens=False)["input_ids"]
