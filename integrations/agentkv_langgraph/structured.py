"""Structured output of ChatAgentKV: asked for, checked, asked for once more, and then an error.

The embedded engine holds the model to the schema while it writes; an answer that is cut, or comes from an engine that
cannot, may miss it all the same, and what misses it twice is an AnswerInvalid with the answer's own words. Covers Pydantic classes, TypedDicts, functions and JSON schemas; by a tool
call, or by JSON in the text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import TypeBaseModel, is_basemodel_subclass

from agentkv.engine.request import ResponseFormat
from agentkv.errors import AgentKVError, ConfigError

Method = Literal["function_calling", "json_schema", "json_mode"]
METHODS: tuple[Method, ...] = ("function_calling", "json_schema", "json_mode")
_FENCED = re.compile(r"```(?:json)?\s*\n?(.*?)```", re.DOTALL)
_SHOWN = 400


class AnswerInvalid(AgentKVError, OutputParserException):
    """A model's answer that is not what was asked for, twice; `llm_output` is what it said."""


class Shape:
    """What an answer must look like, and what is made of it: an object of the user's class, or a dict."""

    def __init__(self, schema: Any, method: str) -> None:
        if method not in METHODS:
            raise ConfigError(f"with_structured_output(method={method!r}): it is one of {', '.join(METHODS)}")
        self.method = method
        self.model: TypeBaseModel | None = (
            schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
        )
        self.tool: dict[str, Any] = convert_to_openai_tool(schema)
        self.name: str = self.tool["function"]["name"]
        self.json_schema: dict[str, Any] = convert_to_json_schema(schema)

    def response_format(self, *, strict: bool) -> ResponseFormat:
        """What holds the text that the model writes; in json_mode the prompt says what is wanted."""
        plain = self.method == "json_mode"
        return ResponseFormat(schema=self.json_schema, name=self.name, strict=strict, plain=plain)

    def instruction(self) -> str:
        """What the model is told where the schema does not come as a tool."""
        return (
            f"Answer with one JSON object and nothing else. It fits this JSON schema:\n{json.dumps(self.json_schema)}"
        )

    def read(self, answer: AIMessage) -> Any:
        """The object; raises ValueError with what is wrong with it."""
        value = self._called(answer) if self.method == "function_calling" else self._written(answer.text)
        if self.model is not None:
            validate: Callable[[Any], Any] = getattr(self.model, "model_validate", None) or self.model.parse_obj
            return validate(value)  # pydantic's errors are ValueErrors
        check_against(self.json_schema, value)
        return value

    def _called(self, answer: AIMessage) -> Any:
        for call in answer.tool_calls:
            if call["name"] == self.name:
                return call["args"]
        broken = [call for call in answer.invalid_tool_calls if call["name"] == self.name]
        if broken:
            raise ValueError(f"the arguments of {self.name} are no JSON object")
        raise ValueError(f"the answer does not call {self.name}")

    def _written(self, text: str) -> Any:
        fenced = _FENCED.search(text)
        body = fenced[1] if fenced else text[max(text.find("{"), 0) : text.rfind("}") + 1 or None]
        try:
            value = json.loads(body)
        except ValueError as error:
            raise ValueError(f"the answer is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"the answer is a JSON {type(value).__name__}, not an object")  # noqa: TRY004  the answer's
        return value


def structured(
    model: Runnable[Any, AIMessage], shape: Shape, messages_of: Callable[[Any], Sequence[BaseMessage]], *, raw: bool
) -> Runnable[Any, Any]:
    """The model with its answers read as `shape`; with `raw` a dict of raw, parsed and parsing_error, never an error."""

    def flow(given: Any) -> Generator[list[BaseMessage], AIMessage, Any]:
        prompt = list(messages_of(given))
        if shape.method == "json_schema":
            prompt = _told(prompt, shape.instruction())
        answer = yield prompt
        try:
            return _result(answer, shape.read(answer), None, raw=raw)
        except ValueError as error:
            first = error
        if answer.response_metadata.get("agentkv", {}).get("stopped_by") == "budget":  # nobody answers a second time
            over = AnswerInvalid(f"no {shape.name}: {answer.text[:_SHOWN]}", llm_output=answer.text)
            if raw:
                return _result(answer, None, over, raw=True)
            raise over from first
        answer = yield [*prompt, answer, *correction(answer, f"That was not right: {first}. Answer again.")]
        try:
            return _result(answer, shape.read(answer), None, raw=raw)
        except ValueError as error:
            invalid = AnswerInvalid(
                f"two answers in a row do not fit {shape.name}: {first}; then {error}. The last one: {answer.text[:_SHOWN]!r}",
                llm_output=answer.text,
            )
            if raw:
                return _result(answer, None, invalid, raw=True)
            raise invalid from error

    def ask(given: Any, **options: Any) -> Any:
        return drive(flow(given), functools.partial(model.invoke, **options))

    async def aask(given: Any, **options: Any) -> Any:
        return await adrive(flow(given), functools.partial(model.ainvoke, **options))

    return RunnableLambda(ask, afunc=aask, name="structured_output")


def drive(steps: Generator[Any, Any, Any], ask: Callable[[Any], Any]) -> Any:
    """Run a flow that yields what is to be asked; what it returns."""
    try:
        question = next(steps)
        while True:
            question = steps.send(ask(question))
    except StopIteration as end:
        return end.value


async def adrive(steps: Generator[Any, Any, Any], ask: Callable[[Any], Any]) -> Any:
    """The same in async code."""
    try:
        question = next(steps)
        while True:
            question = steps.send(await ask(question))
    except StopIteration as end:
        return end.value


def correction(answer: AIMessage, words: str) -> list[BaseMessage]:
    """What is said to an answer that was wrong: to each of its calls, or as the user."""
    ids = [str(call["id"]) for call in (*answer.tool_calls, *answer.invalid_tool_calls) if call["id"]]
    if not ids:
        return [HumanMessage(words)]
    return [ToolMessage(words, tool_call_id=one, status="error") for one in ids]


def check_against(schema: dict[str, Any], value: dict[str, Any]) -> None:
    """Raise ValueError where `value` does not fit: by jsonschema where it is installed, else by the required keys."""
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    try:
        from jsonschema import ValidationError, validate
    except ImportError:
        return
    try:
        validate(value, schema)
    except ValidationError as error:
        raise ValueError(error.message) from error


def _told(prompt: list[BaseMessage], words: str) -> list[BaseMessage]:
    """The prompt with `words` behind the last message: what comes before stays as it was, to the byte."""
    *before, last = prompt
    if isinstance(last, HumanMessage) and isinstance(last.content, str):
        return [*before, last.model_copy(update={"content": f"{last.content}\n\n{words}"})]
    return [*prompt, HumanMessage(words)]


def _result(answer: AIMessage, parsed: Any, error: Exception | None, *, raw: bool) -> Any:
    return {"raw": answer, "parsed": parsed, "parsing_error": error} if raw else parsed
