"""JSON formats, forced calls, several choices and log probabilities, on a model that knows nothing of any of them."""

import json
from dataclasses import replace

import jsonschema
import pytest

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, ToolChoice
from agentkv.errors import RequestInvalid

PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
GET = ToolSpec(
    name="get", description="", strict=True,
    parameters={
        "type": "object", "properties": {"key": {"$ref": "#/$defs/key"}}, "required": ["key"],
        "additionalProperties": False, "$defs": {"key": {"enum": ["a", "b"]}},
    },
)  # fmt: skip
PUT = ToolSpec(name='put "it"', description="", parameters={"type": "object", "properties": {}})


def _chat(text="Go.", **more):
    sampling = more.pop("sampling", Sampling(max_tokens=200))
    task = more.pop("task", "t")
    return Request(messages=(Message(role="user", content=text),), sampling=sampling, caller=Caller(task=task), **more)


@pytest.mark.parametrize("warm", [False, True])
def test_an_answer_is_valid_under_its_schema(start, warm):
    """Greedy and at a temperature at which this model writes noise."""
    engine = start()
    sampling = Sampling(max_tokens=200, temperature=2.0 if warm else 0.0, seed=4)
    told = engine.submit(_chat(response_format=ResponseFormat(schema=PERSON), sampling=sampling)).result(60)
    assert "stop" == told.finish_reason
    jsonschema.validate(json.loads(told.text), PERSON)


def test_text_that_must_come_is_not_computed_token_by_token(start):
    """A step for many: the grammar leaves no choice about names and quotes."""
    engine = start()
    before = engine.stats()["steps"]
    told = engine.submit(_chat(response_format=ResponseFormat(schema=PERSON))).result(60)
    assert engine.stats()["steps"] - before < len(told.token_ids)


def test_any_object_will_do_without_a_schema(start):
    """It starts like one; what is cut says so."""
    told = start().submit(_chat(response_format=ResponseFormat(), sampling=Sampling(max_tokens=9))).result(60)
    assert told.text.startswith("{")
    assert "length" == told.finish_reason or isinstance(json.loads(told.text), dict)


def test_a_schema_that_cannot_be_held_is_refused_by_name(start):
    """Where it is strict; else what can be held is."""
    engine = start()
    odd = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "not": {},
        "additionalProperties": False,
    }
    with pytest.raises(RequestInvalid, match="response_format") as caught:
        engine.submit(_chat(response_format=ResponseFormat(schema=odd)))
    assert "response_format" == caught.value.param
    loose = engine.submit(_chat(response_format=ResponseFormat(schema=odd, strict=False))).result(60)
    assert {"a": 1} == json.loads(loose.text)


@pytest.mark.parametrize("bad", [{"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}])
def test_a_schema_that_is_none_is_refused(start, bad):
    """And the next call is served."""
    engine = start()
    with pytest.raises(RequestInvalid):
        engine.submit(_chat(response_format=ResponseFormat(schema=bad, strict=False)))
    assert engine.submit(_chat(sampling=Sampling(max_tokens=2))).result(60)
    assert 0 == engine.stats()["running"]


def test_a_forced_call_is_a_valid_call(start):
    """One of the tools, with arguments under its schema, and no text."""
    engine = start()
    for seed in range(5):
        sampling = Sampling(max_tokens=400, temperature=1.5, seed=seed)
        choice = ToolChoice(mode="required", parallel=False)
        told = engine.submit(_chat(tools=(GET, PUT), tool_choice=choice, sampling=sampling)).result(60)
        if told.finish_reason == "length":  # noise may fill the open object of the second tool for ever
            assert () == told.tool_calls
            continue
        (call,) = told.tool_calls
        assert "" == told.text
        assert isinstance(json.loads(call.arguments), dict)
        if call.name == "get":
            jsonschema.validate(json.loads(call.arguments), dict(GET.parameters))
        else:
            assert PUT.name == call.name


def test_a_named_tool_is_the_one_that_is_called(start):
    """Whatever the model would have liked."""
    choice = ToolChoice(mode="required", names=("get",))
    told = start().submit(_chat(tools=(PUT, GET), tool_choice=choice)).result(60)
    assert ["get"] == [call.name for call in told.tool_calls]
    assert "tool_calls" == told.finish_reason


def test_parallel_calls_have_names_of_their_own_and_an_end(start):
    """At most eight in a turn, each id once."""
    other = replace(GET, name="set")
    choice = ToolChoice(mode="required")
    told = start().submit(_chat(tools=(GET, other), tool_choice=choice, sampling=Sampling(max_tokens=400))).result(60)
    assert 1 <= len(told.tool_calls) <= 8
    assert len(told.tool_calls) == len({call.id for call in told.tool_calls})


def test_a_strict_tool_leaves_the_text_free(start, tiny):
    """Without a call the answer is what it is without the strict tool's grammar."""
    engine = start()
    loose = ToolSpec(name=GET.name, description="", parameters=GET.parameters)
    free = [engine.submit(_chat(tools=(tool,), task=f"f{tool.strict}")).result(60) for tool in (GET, loose)]
    assert free[0].text == free[1].text


def test_several_choices_of_one_prompt(start):
    """They differ, come again with the same seed, and the prompt is counted and computed once."""
    engine = start()
    prompt = "A prompt that is longer than a block of sixteen tokens."
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=5)
    told = [engine.submit(_chat(prompt, n=3, sampling=sampling, task=f"n{i}")).result(60) for i in range(2)]
    texts = [choice.text for choice in told[0].choices]
    assert 3 == len(set(texts))
    assert texts == [choice.text for choice in told[1].choices]
    alone = engine.submit(_chat(prompt, sampling=sampling, task="alone")).result(60)
    assert alone.text == texts[0]
    assert alone.usage.input_tokens == told[0].usage.input_tokens
    assert sum(len(choice.token_ids) for choice in told[0].choices) == told[0].usage.output_tokens
    assert 1 == told[0].usage.calls
    few = tuple((ord(letter) - 33, 60.0) for letter in "abc")
    told = engine.submit(_chat(prompt, n=3, sampling=Sampling(max_tokens=60, logit_bias=few))).result(60)
    assert told.accepted_tokens == engine.stats()["accepted_tokens"]


def test_chunks_say_which_choice_they_belong_to(start):
    """Joined by choice they are the texts."""
    stream = start().submit(_chat(n=3, sampling=Sampling(max_tokens=12, temperature=1.0, seed=5)))
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choice] += chunk.text
    assert texts == [choice.text for choice in stream.result().choices]
    assert sum(len(choice.token_ids) for choice in stream.result().choices) == len(stream.partial)


def test_cancelling_ends_all_choices(start):
    """Nothing of them is left."""
    engine = start()
    with engine.submit(_chat(n=4, sampling=Sampling(max_tokens=500, temperature=1.0))) as stream:
        next(iter(stream))
    told = engine.submit(_chat(sampling=Sampling(max_tokens=2))).result(60)
    assert told.token_ids
    stats = engine.stats()
    assert (0, 0, 0) == (stats["running"], stats["loading"], stats["waiting"])


@pytest.mark.parametrize("text", ["héllo 👩‍👩‍👧 wörld", "한국어 text", "  indented\n\tcode", "a\u0301 e\u0301"])
def test_log_probabilities_spell_the_text(start, tiny, text):
    """Byte by byte, also of characters that lie across tokens; in one piece and streamed."""
    ids = tuple(tiny.ids(text))
    stream = start().submit(_chat(forced_ids=ids, logprobs=5, sampling=Sampling(max_tokens=200)))
    streamed = [entry for chunk in stream for entry in chunk.logprobs]
    told = stream.result()
    assert text == told.text
    assert text.encode() == b"".join(entry.raw for entry in told.logprobs)
    assert list(told.logprobs) == streamed
    assert all(5 == len(entry.top) and entry.logprob <= 0 for entry in told.logprobs)
    assert all(list(e.top) == sorted(e.top, key=lambda one: -one.logprob) for e in told.logprobs)


def test_log_probabilities_are_the_models_own(start, tiny, ask):
    """Against transformers, also of tokens that were guessed ahead."""
    import torch

    prompt, few = "abababababab", tuple((ord(letter) - 33, 60.0) for letter in "abc")
    told = start().submit(ask(prompt, logprobs=0, sampling=Sampling(max_tokens=60, logit_bias=few))).result(60)
    ids = tiny.ids(prompt)
    logits = tiny.logits([*ids, *told.token_ids]).clone()
    logits[:, [id_ for id_, _ in few]] += 60
    scores = torch.log_softmax(logits, -1)
    for at, entry in enumerate(told.logprobs):
        assert scores[len(ids) + at - 1, entry.token_id].item() == pytest.approx(entry.logprob, abs=1e-4)
    assert told.accepted_tokens


def test_what_a_stop_text_cut_off_has_no_log_probability(start, ask, tiny):
    """Nor has the end token."""
    ids = (*tiny.ids("one two STOP three"), 257)
    told = start().submit(ask("x", logprobs=1, forced_ids=ids, sampling=Sampling(stop=("STOP",)))).result(60)
    assert b"one two " == b"".join(entry.raw for entry in told.logprobs)
    ended = start().submit(ask("x", logprobs=1, forced_ids=(*tiny.ids("bye"), 257))).result(60)
    assert b"bye" == b"".join(entry.raw for entry in ended.logprobs)


def test_a_bias_beyond_the_vocabulary_is_refused(start, ask):
    """With both numbers."""
    with pytest.raises(RequestInvalid, match="token 99999"):
        start().submit(ask("x", sampling=Sampling(max_tokens=2, logit_bias=((99999, 1.0),))))


def test_an_answer_goes_on_with_the_last_message(start, tiny):
    """The prompt ends with the assistant's text, and the answer holds only what is new."""
    engine = start()
    turns = (Message(role="user", content="Count."), Message(role="assistant", content="one, two,"))
    caller = Caller(task="go-on")
    told = engine.submit(
        Request(messages=turns, continue_final_message=True, caller=caller, sampling=Sampling(max_tokens=9))
    ).result(60)
    rendered = tiny.tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in turns], tokenize=False, continue_final_message=True
    )
    assert rendered.endswith("one, two,")
    assert tiny.greedy(rendered, 9) == list(told.token_ids)


def test_a_grammar_that_breaks_ends_its_own_call_only(start, ask, monkeypatch, tiny):
    """The neighbour in the same steps writes what it would have written."""
    from agentkv.engine.local.guide import LLGuide
    from agentkv.errors import ModelError

    def bad(_guide, _scores):
        raise RuntimeError("lexer too complex")

    monkeypatch.setattr(LLGuide, "mask", bad)
    engine = start()
    neighbour = engine.submit(ask("A neighbour", 20))
    with pytest.raises(ModelError, match="too complex"):
        engine.submit(_chat(response_format=ResponseFormat())).result(20)
    assert tiny.greedy("A neighbour", 20) == list(neighbour.result(20).token_ids)
