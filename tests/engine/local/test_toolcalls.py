"""Tool calls in a model's text: valid ones are found, whole and once; everything else stays text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv.engine.local.responses import TemplateGate
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import TagGate, Wanted

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines


def _call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ONE = _call("grep", '{"q":  "a b"}')
CASES = {
    "plain text": ("just text", "just text", []),
    "one call, its arguments byte for byte": (ONE, "", [("grep", '{"q":  "a b"}')]),
    "text before and after": (f"I look.\n{ONE} Done.", "I look.\nDone.", [("grep", '{"q":  "a b"}')]),
    "two calls": (ONE + "\n" + _call("ls", "{}"), "", [("grep", '{"q":  "a b"}'), ("ls", "{}")]),
    "the closing tag inside of a string": (
        _call("echo", '{"t": "x</tool_call>y"}'), "", [("echo", '{"t": "x</tool_call>y"}')],
    ),
    "three levels deep": (_call("f", '{"a": {"b": {"c": [1, {}]}}}'), "", [("f", '{"a": {"b": {"c": [1, {}]}}}')]),
    "a raw line end in a string": (_call("w", '{"t":  "a\nb"}'), "", [("w", '{"t": "a\\nb"}')]),
    "no number": (_call("f", '{"t": NaN}'), _call("f", '{"t": NaN}'), []),
    "half a character as a name": (_call("\\ud800", "{}"), _call("\\ud800", "{}"), []),
    "blanks around": ('<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>', "", [("f", "{}")]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "cut off": ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    "unescaped quotes": (_call("f", '{"t": "a "b" c"}'), _call("f", '{"t": "a "b" c"}'), []),
    "arguments that are no object": (_call("f", "[1]"), _call("f", "[1]"), []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "not JSON": ("<tool_call>f(x)</tool_call>", "<tool_call>f(x)</tool_call>", []),
    "a bad one between good ones": (
        ONE + "<tool_call>?</tool_call>" + ONE, "<tool_call>?</tool_call>", [("grep", '{"q":  "a b"}')] * 2,
    ),
    "almost a tag": ("a <tool_cal b", "a <tool_cal b", []),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("text", "shown", "calls"), CASES.values(), ids=CASES)
def test_calls_are_found_however_the_text_is_cut(text, shown, calls, size):
    """Streaming in pieces of any size gives the text and calls of the whole (E14)."""
    gate = TagGate()
    seen = "".join(gate.feed(text[at : at + size]) for at in range(0, len(text), size))
    rest, wanted = gate.finish(cut=False)
    assert shown == seen + rest
    assert [Wanted(name=name, arguments=arguments) for name, arguments in calls] == wanted


@pytest.mark.parametrize("end", range(1, len(ONE)))
def test_a_call_cut_by_max_tokens_is_no_call(end):
    """At every position: half an argument is never run (E16). What was written stays text."""
    for before in ("", ONE):
        gate = TagGate()
        text = before + ONE[:end]
        shown = gate.feed(text)
        rest, wanted = gate.finish(cut=True)
        if end >= len("<tool_call"):
            assert (text, []) == (shown + rest, wanted)
        else:
            assert (1 if before else 0) == len(wanted)


@PATIENT
@given(text=st.text('<>/tolca_{}":na ', max_size=80))
def test_text_is_never_lost_when_there_is_no_call(text):
    """Whatever looks like a call and is none comes out unchanged."""
    gate = TagGate()
    shown = "".join(gate.feed(letter) for letter in text)
    rest, wanted = gate.finish(cut=False)
    assert (text, []) == (shown + rest, wanted)


def test_a_response_template_reads_the_answer_where_the_tokenizer_has_one(make_tokenizer):
    """transformers' parser knows the model's own syntax; content streams, calls come at the end."""
    tokenizer = make_tokenizer()
    if not hasattr(tokenizer, "get_response_parser"):
        pytest.skip("this transformers has no response templates")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {"open": "[CALL]", "close": "[END]", "repeats": True, "content": "json"},
        },
    }
    try:
        gate = TemplateGate(tokenizer, Tokeniser(tokenizer), prompt="<|im_start|>assistant\n", tools=[])
    except ValueError as error:
        pytest.skip(f"another schema: {error}")
    text = 'Look: [CALL]{"name": "ls", "arguments": {"p": "."}}[END]'
    shown = "".join(gate.feed(letter) for letter in text)
    rest, wanted = gate.finish(cut=False)
    assert "Look:" == (shown + rest).strip()
    assert [Wanted(name="ls", arguments='{"p": "."}')] == wanted
