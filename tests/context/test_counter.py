"""Counter: each message once, blocks by their kind, never an exception."""

import base64
import json
import random
import struct
import threading
import time
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentkv import log
from agentkv.context import counter as module
from agentkv.context.canonical import tools_text
from agentkv.context.counter import FILE_TOKENS, MESSAGE_TOKENS, Counted, Counter
from agentkv.context.images import audio_tokens, image_size, image_tokens
from agentkv.context.tokens import TextCounter
from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.errors import ConfigError


class Words:
    """A tokenizer of words that tells how much it was asked."""

    exact = True

    def __init__(self):
        self.calls = 0
        self.chars = 0

    def __call__(self, text):
        self.calls += 1
        self.chars += len(text)
        return len(text.split())


def turn(number, words=30):
    return Message(role="user", content=f"message {number} " + "word " * words)


def png(width, height):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunk + random.Random(1).randbytes(75_000)).decode()


def jpeg(width, height):
    thumbnail = b"\xff\xe1" + struct.pack(">H", 30_002) + b"\xff\xc0" + bytes(29_998)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(40)
    return base64.b64encode(b"\xff\xd8" + thumbnail + frame).decode()


def webp(width, height):
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4)
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(body)) + body).decode()


def test_each_message_is_counted_once():
    """Of a prompt that grows by one message only that message reaches the tokenizer."""
    words = Words()
    counter = Counter(words)
    messages = [turn(number) for number in range(100)]
    first = counter.prompt(messages)
    asked = words.calls
    assert first + counter.message(turn(100)) == counter.prompt([*messages, turn(100)])
    assert asked + 1 == words.calls


def test_an_equal_message_from_elsewhere_is_not_counted_again():
    """A checkpoint that was read back has other objects with the same texts."""
    words = Words()
    counter = Counter(words)
    counter.prompt([turn(number) for number in range(50)])
    asked = words.calls
    counter.prompt([turn(number) for number in range(50)])
    assert asked == words.calls


@pytest.mark.parametrize("there", [100, 1_000, 10_000])
def test_one_new_message_costs_the_same_however_many_there_are(there):
    """Well below 0.3 ms at 10,000 messages."""
    counter = Counter(Words())
    for number in range(there):
        counter.message(turn(number))
    fastest_s = 1.0
    for number in range(20):
        new = turn(-number)
        start_s = time.perf_counter()
        counter.message(new)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    assert fastest_s < 0.0001


def test_a_whole_prompt_of_200_messages_with_a_new_one_costs_little():
    """Below 0.3 ms; what is old is compared by identity."""
    counter = Counter(Words())
    messages = [turn(number) for number in range(200)]
    counter.prompt(messages)
    fastest_s = 1.0
    for number in range(20):
        messages.append(turn(-number - 1))
        start_s = time.perf_counter()
        counter.prompt(messages)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    assert fastest_s < 0.0003


def test_a_prompt_that_was_folded_counts_like_a_new_one():
    """Only a true prefix of a recent prompt is taken over."""
    counter = Counter(Words())
    messages = [turn(number) for number in range(10)]
    counter.prompt(messages)
    for changed in ([*messages[:3], turn(77, words=99), *messages[4:]], messages[2:], messages[::-1], messages[:1], []):
        assert Counter(Words()).prompt(changed) == counter.prompt(changed)


def test_the_memory_is_bounded():
    """The oldest counts go; the numbers stay right."""
    counter = Counter(Words(), max_entries=10)
    for number in range(100):
        assert MESSAGE_TOKENS + 32 == counter.message(turn(number))
    assert 10 == len(counter)
    with pytest.raises(ConfigError, match="max_entries=0"):
        Counter(Words(), max_entries=0)


def test_no_text_is_kept():
    """A count is found again by a digest of 16 bytes."""
    counter = Counter(Words())
    counter.message(Message(role="user", content="secret " * 100))
    assert [16] == [len(key) for key in counter._known]


def test_calls_count_with_their_name_and_arguments():
    """An assistant turn without text is not empty."""
    call = ToolCall(id="1", name="grep", arguments='{"pattern": "x y z"}')
    assert MESSAGE_TOKENS + 1 + 4 == Counter(Words()).message(Message(role="assistant", tool_calls=(call,)))


def test_tools_are_counted_once_per_set(monkeypatch):
    """Thirty schemas are serialised and counted in the first call only."""
    serialised = []
    monkeypatch.setattr(module, "tools_text", lambda specs: serialised.append(1) or tools_text(specs))
    words = Words()
    counter = Counter(words)
    specs = [ToolSpec(name=f"t{i}", description="a b c", parameters={"type": "object"}) for i in range(30)]
    assert counter.tools(specs) == counter.tools(tuple(specs)) > 30
    assert (1, [1]) == (words.calls, serialised)
    assert 0 == counter.tools([])
    assert counter.prompt([], specs) == counter.tools(specs)


def test_a_schema_with_a_cycle_has_a_count():
    """It is no JSON; counting does not raise."""
    loop = {"type": "object"}
    loop["properties"] = loop
    assert 0 < Counter(Words()).tools([ToolSpec(name="t", description="a b c", parameters=loop)]) < 1000


def test_a_schema_that_cannot_be_serialised_is_counted_by_its_names(monkeypatch):
    """A counter and a log line."""

    def refuse(_specs):
        raise TypeError("not JSON")

    monkeypatch.setattr(module, "tools_text", refuse)
    assert 4 + 1 + 3 == Counter(Words()).tools([ToolSpec(name="t", description="a b c", parameters={})])


@pytest.mark.parametrize(
    ("width", "height", "detail", "model", "tokens"),
    [
        (1024, 1024, "high", "gpt-4o", 765),
        (2048, 4096, "high", "gpt-4o", 1105),
        (4096, 8192, "low", "gpt-4o", 85),
        (512, 512, "auto", None, 255),
        (1024, 1024, "high", "gpt-5", 630),
        (1024, 1024, "high", "gpt-4o-mini", 25501),
        (1024, 1024, "high", "o4-mini", 1762),
        (1800, 2400, "high", "gpt-4.1-mini", 2353),
        (1, 1, "high", "gpt-4o", 255),
        (0, 0, "high", "gpt-4o", 255),
        (100_000, 1, "high", "gpt-4.1-mini", 2489),
    ],
)
def test_images_count_by_the_published_formula(width, height, detail, model, tokens):
    """The examples of OpenAI's guide (1,024 and 1,452 patches times the model's factor among them), and the extremes."""
    assert tokens == image_tokens(width, height, detail, model)


@pytest.mark.parametrize("image", [png, jpeg, webp])
def test_the_size_of_an_image_is_read_from_its_data(image):
    """Also behind a thumbnail that looks like a frame, and with the address form around it."""
    assert (640, 480) == image_size(image(640, 480))
    assert (640, 480) == image_size("data:image/x;base64," + image(640, 480))
    assert None is image_size("https://example.org/a.png")
    assert None is image_size(image(640, 480)[:16])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,DATA", "detail": "high"}},
        {"type": "image_url", "image_url": "data:image/png;base64,DATA"},
        {"type": "input_image", "image_url": "data:image/png;base64,DATA"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "DATA"}},
        {"type": "image", "base64": "DATA", "mime_type": "image/png"},
        {"type": "image", "data": "DATA"},
    ],
)
def test_an_image_in_any_form_counts_by_its_size_and_not_as_text(block):
    """100 kB of base64 are 765 tokens, not 68,000."""
    filled = json.loads(json.dumps(block).replace("DATA", png(1024, 1024)))
    counter = Counter(Words())
    assert MESSAGE_TOKENS + 765 == counter.message({"role": "user", "content": [filled]})
    assert not counter.counted([{"role": "user", "content": [filled]}]).exact


def test_a_picture_behind_an_address_counts_as_one_of_usual_size():
    """Nobody fetches it."""
    block = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    assert 85 == Counter(Words()).content([block])
    assert 765 == Counter(Words()).content([{"type": "image", "url": "https://example.org/a.png"}])


def test_a_sound_counts_by_its_duration():
    """100 kB are a few seconds; a WAV's header says how many."""
    wav = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16_000, 2, 16) + bytes(160_000)
    data = base64.b64encode(wav).decode()
    assert 100 <= Counter(Words()).content([{"type": "input_audio", "input_audio": {"data": data}}]) <= 102
    assert 47 == audio_tokens("A" * 100_000)
    assert 47 == Counter(Words()).content([{"type": "audio", "data": "A" * 100_000}])


def test_other_blocks_count_by_what_the_model_reads_of_them():
    """Texts, calls and results as text; files flat; what is unknown not at all."""
    counter = Counter(Words())
    assert 5 == counter.content(["a b", {"type": "text", "text": "c d e"}])
    assert 1 + 2 == counter.content([{"type": "tool_use", "id": "1", "name": "grep", "input": {"a": 1}}])
    assert 3 == counter.content([{"type": "tool_result", "content": [{"type": "text", "text": "a b c"}]}])
    assert FILE_TOKENS == counter.content([{"type": "file", "file": {"file_data": "A" * 100_000}}])
    assert 2 == counter.content([{"type": "thinking", "thinking": "let me", "signature": "A" * 1000}])
    assert 0 == counter.content([{"type": "new", "blob": "x y z"}, None, 3, {"type": "text", "text": None}])
    function = {"id": "1", "type": "function", "function": {"name": "grep", "arguments": '{"a": 1}'}}
    assert MESSAGE_TOKENS + 3 == counter.message({"role": "assistant", "content": None, "tool_calls": [function]})


def test_an_estimate_is_flagged():
    """`exact` is the tokenizer's word, and gone where something was guessed."""
    assert Counted(tokens=MESSAGE_TOKENS + 1, exact=True) == Counter(Words()).counted(
        [Message(role="user", content="a")]
    )
    assert not Counter(len).exact
    assert Counter(len, exact=True).exact
    assert Counter(TextCounter("gpt-4o")).exact
    assert not Counter(TextCounter("nobody-knows")).exact


def test_a_tokenizer_that_fails_becomes_an_estimate():
    """One counter and a log line without the text."""

    def broken(_text):
        raise ValueError("no")

    before = log.counters["text_not_counted"]
    assert 0 < Counter(broken).message(Message(role="user", content="hello")) - MESSAGE_TOKENS < 4
    assert log.counters["text_not_counted"] == before + 1


def test_threads_share_a_counter():
    """Eight of them, a memory that is too small, and right numbers throughout."""
    counter = Counter(Words(), max_entries=7)
    wrong = []

    def run():
        counts = (counter.message(turn(number % 20)) for number in range(300))
        wrong.extend(tokens for tokens in counts if tokens != MESSAGE_TOKENS + 32)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "image_url", "url", "data", "name", "input", "content", "function"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON))
@example({"content": [{"type": ["text"], "text": "x"}]})
@example({"content": [{"type": {"a": 1}}]})
def test_any_message_has_a_count(message):
    """Whatever a caller made of it."""
    assert Counter(TextCounter("gpt-4o")).message(message) >= MESSAGE_TOKENS


def test_short_texts_are_not_remembered():
    """Counting ten characters again costs less than a digest."""
    counter = Counter(Words())
    counter.text("x" * (module.SHORT_CHARS - 1))
    assert 0 == len(counter)
