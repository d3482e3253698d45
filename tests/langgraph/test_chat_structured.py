"""Structured output and the choice of a tool: checked, asked for once more, then an error that says what was wrong."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
from agentkv_langgraph import ChatAgentKV
from agentkv_langgraph.structured import AnswerInvalid
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from agentkv import ToolCall
from agentkv.engine.script import Reply
from agentkv.errors import ConfigError


class Place(BaseModel):
    """A place."""

    city: str
    people: int = Field(ge=0)


class PlaceDict(TypedDict):
    """A place."""

    city: str
    people: int


GOOD = '{"city": "Köln", "people": 1}'
BAD = '{"city": "Köln", "people": -1}'
BOTH = pytest.mark.parametrize("is_async", [False, True])


def called(arguments: str, name: str = "Place") -> Reply:
    return Reply(tool_calls=(ToolCall(id="call-0", name=name, arguments=arguments),))


def ask(runnable: Any, text: Any, is_async: bool = False) -> Any:
    return asyncio.run(runnable.ainvoke(text)) if is_async else runnable.invoke(text)


ANSWERS = {
    "function_calling": called,
    "json_schema": lambda arguments: Reply(text=f"Here:\n```json\n{arguments}\n```"),
    "json_mode": lambda arguments: Reply(text=arguments),
}


@BOTH
@pytest.mark.parametrize("method", ANSWERS)
def test_an_answer_that_fits_is_an_object_of_the_schema(make_kv, method, is_async) -> None:
    """A Pydantic class gives its object, everything else a dict."""
    for schema, expected in (
        (Place, Place(city="Köln", people=1)),
        (Place.model_json_schema(), {"city": "Köln", "people": 1}),
    ):
        kv = make_kv([ANSWERS[method](GOOD)])
        assert expected == ask(ChatAgentKV(kv).with_structured_output(schema, method=method), "where?", is_async)


WAYS = {
    "call": lambda runnable, text, **options: runnable.invoke(text, **options),
    "async call": lambda runnable, text, **options: asyncio.run(runnable.ainvoke(text, **options)),
    "bound": lambda runnable, text, **options: runnable.bind(**options).invoke(text),
    "stream": lambda runnable, text, **options: list(runnable.stream(text, **options))[-1],
    "async stream": lambda runnable, text, **options: asyncio.run(_last(runnable.astream(text, **options))),
    "batch": lambda runnable, text, **options: runnable.batch([text], **options)[0],
    "with a config": lambda runnable, text, **options: runnable.invoke(text, {"tags": ["t"]}, **options),
}


async def _last(items: Any) -> Any:
    return [item async for item in items][-1]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("raw", [False, True], ids=["", "raw"])
@pytest.mark.parametrize("method", ANSWERS)
def test_options_of_a_call_reach_the_model_both_times(make_kv, method, raw, way) -> None:
    """Sampling, stops and what is said about the template, as without a schema; a typo is an error there too."""
    kv = make_kv([ANSWERS[method](BAD), ANSWERS[method](GOOD)])
    structured = ChatAgentKV(kv).with_structured_output(Place, method=method, include_raw=raw)
    answer = way(structured, "where?", max_tokens=500, stop=["END"], temperature=0.0, session="mine")
    assert Place(city="Köln", people=1) == (answer["parsed"] if raw else answer)
    assert [(500, ("END",), 0.0)] * 2 == [
        (one.sampling.max_tokens, one.sampling.stop, one.sampling.temperature) for one in kv.engine.requests
    ]
    assert ["mine"] * 2 == [one.session for one in kv.engine.requests]
    with pytest.raises(ConfigError, match="temprature"):
        way(structured, "where?", temprature=1)


@BOTH
@pytest.mark.parametrize("method", ANSWERS)
def test_an_answer_that_does_not_fit_is_asked_for_once_more(make_kv, method, is_async) -> None:
    """The model is told what was wrong, behind all that was said."""
    kv = make_kv([ANSWERS[method](BAD), ANSWERS[method](GOOD)])
    structured = ChatAgentKV(kv, context=False).with_structured_output(Place, method=method)
    assert 1 == ask(structured, "where?", is_async).people
    first, second = kv.engine.requests
    assert first.messages == second.messages[: len(first.messages)]
    assert "greater than or equal to 0" in second.messages[-1].content


@BOTH
@pytest.mark.parametrize("method", ANSWERS)
def test_two_wrong_answers_are_an_error_that_says_both(make_kv, method, is_async) -> None:
    """With include_raw it is handed over instead."""
    kv = make_kv([Reply(text="In Köln."), ANSWERS[method](BAD)] * 2)
    model = ChatAgentKV(kv)
    with pytest.raises(AnswerInvalid, match="do not fit Place"):
        ask(model.with_structured_output(Place, method=method), "where?", is_async)
    answer = ask(model.with_structured_output(Place, method=method, include_raw=True), "where?", is_async)
    assert answer["parsed"] is None
    assert isinstance(answer["parsing_error"], AnswerInvalid)
    assert isinstance(answer["raw"], AIMessage)


def test_a_typed_dict_with_a_value_of_the_wrong_type_does_not_fit(make_kv) -> None:
    """The whole schema is checked, not only which keys are there."""
    kv = make_kv([called('{"city": 3, "people": 1}', "PlaceDict"), called(GOOD, "PlaceDict")])
    assert {"city": "Köln", "people": 1} == ChatAgentKV(kv).with_structured_output(PlaceDict).invoke("where?")
    assert 2 == len(kv.engine.requests)


def test_a_method_or_an_option_that_does_not_exist_is_an_error(kv) -> None:
    """At once."""
    with pytest.raises(ConfigError, match="function_calling, json_schema, json_mode"):
        ChatAgentKV(kv).with_structured_output(Place, method="magic")
    with pytest.raises(ConfigError, match="inclde_raw"):
        ChatAgentKV(kv).with_structured_output(Place, inclde_raw=True)


# -- tool_choice


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return city


@BOTH
@pytest.mark.parametrize(
    "choice", ["any", "required", True, "weather", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_choice_that_was_missed_is_asked_for_once_more(make_kv, choice, is_async) -> None:
    """In every spelling."""
    kv = make_kv(["Nice.", called('{"city": "Köln"}', "weather")])
    answer = ask(ChatAgentKV(kv).bind_tools([weather], tool_choice=choice), "weather?", is_async)
    assert ["weather"] == [call["name"] for call in answer.tool_calls]


def test_a_choice_that_is_missed_twice_is_an_error_and_in_a_stream_at_once(make_kv) -> None:
    """What has been streamed cannot be taken back."""
    kv = make_kv(["Nice."] * 3)
    model = ChatAgentKV(kv).bind_tools([weather], tool_choice="any")
    with pytest.raises(AnswerInvalid, match="no tool of weather"):
        model.invoke("weather?")
    with pytest.raises(AnswerInvalid):
        list(model.stream("weather?"))
    assert 3 == len(kv.engine.requests)


def test_an_agents_response_format_works_by_a_tool(make_kv) -> None:
    """create_agent(response_format=ToolStrategy(...)) asks for a choice."""
    kv = make_kv(["Nice.", called(GOOD)])
    agent = create_agent(ChatAgentKV(kv), [], response_format=ToolStrategy(Place))
    assert Place(city="Köln", people=1) == agent.invoke({"messages": [HumanMessage("where?")]})["structured_response"]


def test_tokens_are_counted_by_the_engine(kv) -> None:
    """Not by a tokenizer that would have to be downloaded."""
    model = ChatAgentKV(kv)
    assert 3 == model.get_num_tokens("one two three")
    assert (
        0
        < model.get_num_tokens_from_messages([HumanMessage("one")])
        < model.get_num_tokens_from_messages([HumanMessage("one")], tools=[weather])
    )


# -- the engine holds the model to what was asked for


@BOTH
def test_the_engine_is_told_what_the_answer_must_be(make_kv, is_async) -> None:
    """The tool, the schema; in json_mode that the prompt says it already; and that there is one call at most."""
    kv = make_kv([called(GOOD), GOOD, GOOD, called('{"city": "Köln"}', "weather")])
    model = ChatAgentKV(kv)
    for method in ("function_calling", "json_schema", "json_mode"):
        ask(model.with_structured_output(Place, method=method), "where?", is_async)
    ask(model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True), "weather?", is_async)
    by_tool, by_schema, by_mode, chosen = kv.engine.requests
    assert ("required", ("Place",), False) == (
        by_tool.tool_choice.mode, by_tool.tool_choice.names, by_tool.tool_choice.parallel,
    )  # fmt: skip
    assert {"city", "people"} == set(by_schema.response_format.schema["properties"])
    assert (by_schema.response_format.schema, True) == (by_mode.response_format.schema, by_mode.response_format.plain)
    assert (True, False) == (chosen.tools[0].strict, chosen.tool_choice.parallel)


def test_a_response_format_of_openais_is_taken(make_kv) -> None:
    """Bound or per call; what is none is an error."""
    kv = make_kv(["{}", "{}"])
    model = ChatAgentKV(kv)
    model.bind(response_format={"type": "json_object"}).invoke("a")
    schema = {"type": "object", "properties": {}}
    model.invoke("a", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert [None, schema] == [request.response_format.schema for request in kv.engine.requests]
    with pytest.raises(ConfigError, match="json_schema"):
        model.invoke("a", response_format={"type": "xml"})


def test_an_engine_that_cannot_hold_an_answer_is_asked_freely(make_kv, monkeypatch) -> None:
    """And the answer is checked."""
    from agentkv.engine.base import refuse_unless

    kv = make_kv([called(GOOD)])
    submit = kv.engine.submit

    def simple(request):
        refuse_unless(request, frozenset(), engine="a simple engine")
        return submit(request)

    monkeypatch.setattr(kv.engine, "submit", simple)
    assert 1 == ChatAgentKV(kv).with_structured_output(Place).invoke("where?").people
