"""Loops of other people's agents against the server: a tool is forced, called, and its result is answered."""

from __future__ import annotations

import json

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentkv import ToolCall

CALL = ToolCall(id="call_1", name="weather", arguments='{"city": "Praha"}')


@pytest.fixture
async def client_of():
    clients = []

    def make(place) -> AsyncOpenAI:
        clients.append(AsyncOpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


def check(place, *, forced: bool) -> None:
    """Two calls of one growing prompt; the first was forced, if asked; the tool's result is in the second."""
    first, second = place.kv.engine.requests
    assert ("weather", {"type": "string"}) == (
        first.tools[0].name,
        {"type": first.tools[0].parameters["properties"]["city"]["type"]},
    )
    if forced:
        assert "required" == first.tool_choice.mode
    assert first.messages == second.messages[: len(first.messages)]
    (call,) = second.messages[-2].tool_calls
    assert ("call_1", "weather", {"city": "Praha"}) == (call.id, call.name, json.loads(call.arguments))
    assert ("sunny in Praha", "call_1") == (second.messages[-1].content, second.messages[-1].tool_call_id)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chats", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents_force_and_answer_a_tool(scripted_place, client_of, kind, streamed):
    """The OpenAI Agents SDK on both endpoints, whole and streamed, with its strict tools as they come."""
    set_tracing_disabled(True)
    place = scripted_place(CALL, "It is sunny.")

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    model = kind(model="scripted", openai_client=client_of(place))
    settings = ModelSettings(
        tool_choice="weather", parallel_tool_calls=False, temperature=0.1, max_tokens=50, include_usage=True
    )
    agent = Agent(name="teller", instructions="Be brief.", tools=[weather], model=model, model_settings=settings)
    if streamed:
        result = Runner.run_streamed(agent, "How is it in Praha?")
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
    else:
        result = await Runner.run(agent, "How is it in Praha?")
    assert "It is sunny." == result.final_output
    usage = result.context_wrapper.usage
    assert (2, place.kv.report("unattributed").usage.output_tokens) == (usage.requests, usage.output_tokens)
    assert place.kv.engine.requests[0].tools[0].strict
    check(place, forced=True)


@pytest.mark.parametrize("kind", [OpenAIChatModel, PydanticResponsesModel], ids=["chats", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai_calls_a_tool(scripted_place, client_of, kind, streamed):
    """pydantic-ai on both endpoints; its usage is the bill's."""
    place = scripted_place(CALL, "It is sunny.")
    agent = PydanticAgent(
        kind("scripted", provider=OpenAIProvider(openai_client=client_of(place))), instructions="Be brief."
    )

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    if streamed:
        async with agent.run_stream("How is it in Praha?") as result:
            assert "It is sunny." == await result.get_output()
            usage = result.usage
    else:
        run = await agent.run("How is it in Praha?")
        assert "It is sunny." == run.output
        usage = run.usage
    assert (2, place.kv.report("unattributed").usage.output_tokens) == (usage.requests, usage.output_tokens)
    check(place, forced=False)


async def test_pydantic_ai_forces_a_structured_answer(scripted_place, client_of):
    """An output type is a forced tool there: `tool_choice` "required" reaches the engine, and the answer is validated."""
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        sunny: bool

    call = ToolCall(id="call_1", name="final_result", arguments='{"city": "Praha", "sunny": true}')
    place = scripted_place(call)
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=client_of(place)))
    result = await PydanticAgent(model, output_type=Weather).run("How is it in Praha?")
    assert Weather(city="Praha", sunny=True) == result.output
    assert "required" == place.kv.engine.requests[0].tool_choice.mode
