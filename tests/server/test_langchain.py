"""LangChain's own standard tests of chat models, through its OpenAI client and our server.

Declared unsupported: images, audio, files (the engine reads text only). The engine answers sensibly from a script.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from agentkv import AgentKV, Request, ScriptedEngine, ToolCall
from agentkv.engine.scripted import Reply

ids = itertools.count()


def sensible(request: Request) -> str | Reply:
    """What a helpful model would say: the tool that it is given, JSON where it is asked for, and numbers."""
    last = request.messages[-1]
    if request.response_format is not None and request.response_format.schema is not None:
        return arguments_of(request.response_format.schema, last.content)
    if request.tools and last.role != "tool":
        wanted = [tool for tool in request.tools if tool.name in request.tool_choice.names or tool.name in last.content]
        tool = (wanted or request.tools)[0]
        call = ToolCall(id=f"c{next(ids)}", name=tool.name, arguments=arguments_of(tool.parameters, last.content))
        return Reply(tool_calls=(call,))
    if "JSON" in last.content:
        return json.dumps({"setup": "Why do cats purr?", "punchline": "Because they can."})
    return "1 2 3 4 5 6 7 8 9 10" if "ount" in last.content else "Here is an answer in several words, as you asked."


def arguments_of(schema: Any, asked: str) -> str:
    """Values that fit a JSON schema, taken from what was asked where that is possible."""
    return json.dumps({name: value(name, part, asked) for name, part in schema.get("properties", {}).items()})


def value(name: str, part: dict[str, Any], asked: str) -> Any:
    kind = part.get("type") or next((one.get("type") for one in part.get("anyOf", ())), "string")
    numbers, foreign = re.findall(r"\d+", asked), re.findall(r"[^\x00-\x7f]+", asked)
    known = {
        "integer": int(numbers[0]) if numbers else 3,
        "number": 3,
        "boolean": True,
        "array": [],
        "object": {},
        "string": part.get("enum", [foreign[0] if foreign else f"a {name}"])[0],
    }
    return "San Francisco" if name == "location" else known[kind]


@pytest.fixture
def served(request: Any, place_of: Any) -> Any:
    place = place_of(AgentKV.with_engine(ScriptedEngine(itertools.repeat(sensible))))
    request.instance.url = f"{place.url}/v1"
    return place


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai's parsed messages, copied by LangChain
@pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema")
@pytest.mark.usefixtures("served")
class TestChatOpenAI(ChatModelIntegrationTests):
    """Every way to call a chat model."""

    url: str

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "base_url": self.url, "api_key": "none", "stream_usage": True, "max_retries": 0}

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one model is served


@pytest.mark.slow
class TestChatOpenAIOverResponses(TestChatOpenAI):
    """The same through the responses endpoint."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
