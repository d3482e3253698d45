"""A held answer behind a thought: whatever the model would like to write, and however its vocabulary cuts the marks."""

import json
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, ToolChoice
from agentkv.engine.local.behind import BehindThought, MarkTokens
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.sampler import Chooser
from agentkv.engine.local.thoughts import MARKS
from agentkv.errors import ModelError

ANSWERS = (b'{"v": 1}', b"<tool_call>x", b"<thin>", b'"\n"')
END = 0


class Words:
    """A guide that permits the answers, and then an end token. It fails where a real one would."""

    def __init__(self, raw):
        self.raw, self.text, self.ended, self.broken = raw, b"", False, False

    def permits(self, token):
        text = self.text + self.raw[token]
        return self.text in ANSWERS if token == END else bool(self.raw[token]) and _begun(text)

    def mask(self, scores):
        allowed = [self.permits(token) for token in range(len(self.raw))]
        if not any(allowed):
            raise ModelError("nothing is permitted")
        return scores.masked_fill_(~torch.tensor(allowed), -torch.inf)

    def accept(self, token):
        assert self.permits(token), (self.text, self.raw[token])
        self.text += self.raw[token] if token != END else b""
        self.ended = token == END

    def ahead(self, most):
        return ()


LETTERS = [bytes([letter]) for letter in sorted(set(b"".join((*ANSWERS, b"[/THINK]</think> a\r\n"))))]
NASTY = [
    b"<think>", b"</think>", b"<th", b"</", b"</th", b"k>", b">\n\n", b">{", b'>{"v', b"k>\n", b"\n\n", b"\r\n", b"<think>\n", b"[THINK]", b"[/THINK]",
    b"a</", b"a</think>", b"</think>\n", b'</think>{"v', b'a</think>{"', b"<think></think>", b"<think></think>{", b"<tool", b"]{", b"]\n", b'\n{"', b"",
]  # fmt: skip


@given(
    pieces=st.lists(st.sampled_from(NASTY), unique=True),
    liked=st.lists(st.integers(0, 10**6), max_size=60),
    marks=st.sampled_from(MARKS),
    begun=st.booleans(),
)
def test_an_answer_is_a_thought_or_none_and_then_what_the_grammar_permits(pieces, liked, marks, begun):
    """Followed token by token; the answer's end comes only behind an answer."""
    raw = [b"<|end|>", *LETTERS, *pieces]
    guide = BehindThought(lambda: Words(raw), MarkTokens(marks, raw, ends=[END]), begun=begun)
    text, ended = b"", False
    for wish in liked:
        scores = guide.mask(torch.rand(len(raw), generator=torch.Generator().manual_seed(wish)))
        token = int(scores.argmax())
        assert scores[token] > -torch.inf
        assert not guide.ahead(8)
        guide.accept(token)
        ended = token == END
        text += b"" if ended else raw[token]
        assert ended == guide.ended
        if ended:
            break
    opening, closing = marks.opening.encode(), marks.closing.encode()
    if begun or text.startswith(opening):
        _, closed, rest = text.removeprefix(b"" if begun else opening).partition(closing)
        assert closed or not ended
        assert _begun(rest) or _begun(rest.lstrip(b"\r\n"))
    else:
        assert opening.startswith(text) or _begun(text)
    assert not ended or text.endswith(ANSWERS)


def _begun(text):
    return any(answer.startswith(text) for answer in ANSWERS)


SCHEMA = {
    "type": "object",
    "properties": {"v": {"enum": ["a", "b"]}},
    "required": ["v"],
    "additionalProperties": False,
}
TOOL = ToolSpec(name="get", parameters=SCHEMA, strict=True)
HELD = {
    "value": {"response_format": ResponseFormat(schema=SCHEMA)},
    "calls": {"tools": (TOOL,), "tool_choice": ToolChoice(mode="required")},
    "either": {
        "tools": (TOOL,),
        "tool_choice": ToolChoice(parallel=False),
        "response_format": ResponseFormat(schema=SCHEMA),
    },
    "text": {"tools": (TOOL,)},
}
THOUGHT = "Hm, 1 < 2 </th\n\n<tool_call> {é👩‍👩‍👧 STOP"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}{% if tools %}{% endif %}"
TEMPLATES = {
    "writes": f"{CHATML}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% if enable_thinking is false %}}<think>\n\n</think>\n\n{{% endif %}}{{% endif %}}",
    "opened": f"{CHATML}{{% if add_generation_prompt %}}<|im_start|>assistant\n<think>\n{{% endif %}}",
}


@pytest.fixture(scope="module", params=["writes", "opened", "writes, one token"])
def engine(request, models, tmp_path_factory):
    """A model that thinks: it opens the thought itself, or its template does; marks of many tokens, or of one."""
    template = TEMPLATES[request.param.split(",")[0]]
    made = models.tokenizer(template)
    if "one token" in request.param:
        made.add_tokens(["<think>", "</think>"])
    folder = tmp_path_factory.mktemp("thinks")
    models.save(folder, template=template, vocab_size=len(made))
    made.save_pretrained(folder)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    started = LocalEngine(loaded, device_memory=96 * loaded.geometry.block_bytes, host_memory=1 << 22)
    started.opened = "opened" in request.param
    yield started
    started.tiers.check()
    started.close()


@pytest.fixture
def likes(engine, monkeypatch):
    """`likes(text, end=True)`: what the model would write: each token of it is chosen wherever it is permitted."""
    wished, written, whole = [], defaultdict(list), Chooser.pick

    def pick(self, logits, forced=None):
        at, row = written[id(self)], logits.float().clone()
        if len(at) < len(wished):
            row[wished[len(at)]] += 1e4
        picked = whole(self, row, forced)
        at.append(picked.token)
        return picked

    monkeypatch.setattr(Chooser, "pick", pick)

    def put(text, *, end=False):
        written.clear()
        wished[:] = engine._intake.tokeniser.encode(text).ids + [257] * end

    return put


def asked(engine, **more):
    """The answer, streamed and whole alike."""
    more = {"messages": (Message(role="user", content="Go."),), "sampling": Sampling(max_tokens=220), **more}
    stream = engine.submit(Request(caller=Caller(task="t"), **more))
    chunks = list(stream)
    whole = stream.result(60)
    assert whole.text == "".join(chunk.text for chunk in chunks)
    assert whole.reasoning == "".join(chunk.reasoning for chunk in chunks)
    return whole


def keeps(whole, kind):
    """Whether it is what was asked for; a strict tool alone leaves all text free."""
    values = [json.loads(call.arguments) for call in whole.tool_calls]
    if not values and kind in {"value", "either"}:
        values = [json.loads(whole.text)]
    return bool(values or kind == "text") and all(value in ({"v": "a"}, {"v": "b"}) for value in values)


@pytest.mark.parametrize("kind", HELD)
def test_a_held_answer_is_thought_about_first(engine, likes, kind):
    """The thought is the model's own, tags and all; behind it stands what was asked for."""
    likes(f"{'' if engine.opened else '<think>' + chr(10)}{THOUGHT}\n</think>\n\n")
    whole = asked(engine, **HELD[kind])
    assert THOUGHT == whole.reasoning
    assert keeps(whole, kind)
    assert whole.usage.reasoning_tokens >= len(THOUGHT)


@pytest.mark.parametrize("kind", HELD)
def test_a_model_that_would_rather_not_think_answers(engine, likes, kind):
    """Where the template has not begun the thought, the answer may come at once."""
    likes("</think>" if engine.opened else {"calls": "<tool_call>", "text": "He"}.get(kind, '{"v'))
    whole = asked(engine, **HELD[kind])
    assert "" == whole.reasoning
    assert keeps(whole, kind)


@pytest.mark.parametrize("kind", ["value", "calls", "either"])
def test_no_answer_ends_in_its_thought(engine, likes, kind):
    """Not by an end token; max_tokens may cut it, and then there is no answer."""
    likes(f"{'' if engine.opened else '<think>'}Hm", end=True)
    whole = asked(engine, **HELD[kind])
    assert whole.reasoning.startswith("Hm")
    assert "length" == whole.finish_reason or keeps(whole, kind)
    whole = asked(engine, **HELD[kind], sampling=Sampling(max_tokens=9))
    assert ("length", "", ()) == (whole.finish_reason, whole.text, whole.tool_calls)


def test_a_thought_that_was_switched_off_is_not_begun_again(engine, likes):
    """Though the model would like to."""
    if engine.opened:
        pytest.skip("its template has no switch")
    likes("<think>Hm")
    whole = asked(engine, **HELD["value"], reasoning_effort="none")
    assert ("", True) == (whole.reasoning, keeps(whole, "value"))


def test_an_answer_that_has_begun_is_not_thought_about(engine, likes):
    """Its text goes on."""
    likes("<think>Hm")
    turns = (Message(role="user", content="Go."), Message(role="assistant", content="Yes: "))
    whole = asked(engine, **HELD["value"], messages=turns, continue_final_message=True)
    assert ("", True) == (whole.reasoning, keeps(whole, "value"))
