"""ChatAgentKV: a LangChain chat model over an agentkv engine.

Covers invoke, ainvoke, stream, astream, bind_tools and per-call options. How messages are carried over is in
`messages.py`, structured output in `structured.py`, what an answer must be in `choice.py`; budgets, bills and hints happen
behind `kv.submit`.
"""
# ruff: noqa: A002  argument names are LangChain's

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypedDict, Unpack

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, Field

from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.engine.base import Chunk, Generation, Request, Sampling
from agentkv.errors import ConfigError
from agentkv_langgraph.caller import caller_of_metadata, named_in_metadata
from agentkv_langgraph.choice import Choice, format_of, kept, submitted
from agentkv_langgraph.handed import asteps, handed, steps
from agentkv_langgraph.messages import (
    REASONING,
    to_ai_message,
    to_call_chunk,
    to_call_chunks,
    to_messages,
    to_tools,
    turn_fields,
)
from agentkv_langgraph.structured import Shape, adrive, drive, structured

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_TEMPLATE = ("reasoning_effort", "chat_template_kwargs")
_PER_CALL = {
    *_SAMPLING, *_TEMPLATE, "stop", "tools", "tool_choice", "parallel_tool_calls", "strict", "response_format", "session", "context",
    "stream", "stream_usage",
}  # fmt: skip


class ChatOptions(TypedDict, total=False):
    """Everything that ChatAgentKV takes besides the AgentKV."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: list[str] | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None
    streaming: bool
    context: bool
    name: str | None
    cache: BaseCache | bool | None
    callbacks: Callbacks
    tags: list[str] | None
    metadata: dict[str, Any] | None
    rate_limiter: BaseRateLimiter | None
    disable_streaming: bool
    verbose: bool


class ChatAgentKV(BaseChatModel):
    """`ChatAgentKV(kv)`: the chat model that nodes call.

    Sampling options may be given here, with `.bind(...)`, or per call; the later one wins. Calls are attributed to
    whoever calls (`kv.task`, else the running graph). `usage_metadata` carries cached tokens, and
    `response_metadata["agentkv"]` the session, where the call's time went, and how its tokens were chosen. With context=False messages are sent as
    they are: nothing is slimmed, folded or recalled. `reasoning_effort` ("none" to "xhigh") says how much a model that thinks
    is to think, `chat_template_kwargs` sets further variables of its chat template.

    Raises ConfigError for an option that does not exist.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kv: Any = Field(exclude=True, repr=False)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    streaming: bool = False
    context: bool = True

    def __init__(self, kv: Any, **options: Unpack[ChatOptions]) -> None:
        unknown = sorted(set(options) - set(type(self).model_fields))
        if unknown:
            raise ConfigError(
                f"ChatAgentKV knows no option {', '.join(unknown)}; it takes {', '.join((*_SAMPLING, *_TEMPLATE))}, stop, "
                "context"
            )
        super().__init__(kv=kv, **options)  # type: ignore[call-arg, misc]

    @property
    def model_name(self) -> str:
        """The engine's model."""
        return str(self.kv.engine.model)

    @property
    def _llm_type(self) -> str:
        return "agentkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model_name", "stop", *_SAMPLING, *_TEMPLATE)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="agentkv", ls_model_name=str(kwargs.get("model", self.model_name)), ls_model_type="chat"
        )
        if self.temperature is not None:
            params["ls_temperature"] = self.temperature
        if self.max_tokens is not None:
            params["ls_max_tokens"] = self.max_tokens
        if stop or self.stop:
            params["ls_stop"] = list(stop or self.stop or ())
        return params

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. `tool_choice`: "auto", "none" (no tools are sent), "any", or a tool's name.

        The embedded engine holds the model to a choice, and with strict=True to the schemas of the arguments. Elsewhere an
        answer that misses the choice is asked for once more, and then AnswerInvalid is raised; a streamed answer is
        checked when it is complete. `parallel_tool_calls=False`: at most one call.
        """
        specs = to_tools(tools)
        Choice.of(tool_choice, specs)
        return super().bind(tools=specs, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A runnable that gives an object of `schema` (a Pydantic class, a TypedDict, a JSON schema: then a dict).

        `method`: "function_calling" reads a tool call, "json_schema" tells the model the schema and reads JSON from
        its text, "json_mode" reads JSON that your own prompt asks for. The embedded engine holds the model to the schema
        while it writes (another endpoint is told only that JSON is wanted, in json_mode); `strict` refuses a schema that
        cannot be held in full. An answer that does not fit all the same is asked for once more, and then AnswerInvalid is raised. It does not stream.
        """
        if kwargs:
            raise ConfigError(f"with_structured_output knows no option {', '.join(sorted(kwargs))}")
        shape = Shape(schema, method)
        told = {"kwargs": {"method": method}, "schema": shape.tool}
        if method == "function_calling":
            asked = self.bind_tools(
                [schema],
                tool_choice=Choice(names=frozenset((shape.name,)), checked_elsewhere=True),
                parallel_tool_calls=False,
                strict=strict,
                ls_structured_output_format=told,
            )
        else:
            asked = self.bind(
                response_format=shape.response_format(strict=bool(strict)), ls_structured_output_format=told
            )
        return structured(asked, shape, lambda given: self._convert_input(given).to_messages(), raw=include_raw)

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text, as the engine counts them."""
        return int(self.kv.engine.count_tokens(Request(prompt=text)))

    def get_token_ids(self, text: str) -> list[int]:
        """A text's tokens by the engine's own tokenizer, as a prompt has them.

        Raises NotImplementedError where the engine tells none (another endpoint), instead of asking for somebody else's.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        ids = getattr(self.kv.engine, "text_ids", None)
        if ids is None:
            raise NotImplementedError(
                f"the engine of {self.model_name} tells no token ids; get_num_tokens counts them, and "
                "custom_get_token_ids=... sets a tokenizer of your own"
            )
        return list(ids(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of a prompt, as the engine counts them."""
        request = Request(messages=to_messages(messages), tools=to_tools(tools or ()), **self._rendering({}))
        return int(self.kv.engine.count_tokens(request))

    # -- who calls: a config handed over explicitly names its task even in a thread that LangGraph does not know

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return super().invoke(input, self._told(config), **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return await super().ainvoke(input, self._told(config), **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        told = self._told(config)
        return steps(super().stream(input, told, **kwargs), _named_in(told))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        told = self._told(config)
        return asteps(super().astream(input, told, **kwargs), _named_in(told))

    def stream_events(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().stream_events(input, self._told(config), **kwargs)

    def astream_events(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().astream_events(input, self._told(config), **kwargs)

    def _told(self, config: RunnableConfig | None) -> RunnableConfig | None:
        told: Any = None if config is None else named_in_metadata(config, self.kv)
        return told  # type: ignore[no-any-return]

    # -- the call

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request, choice = self._request(messages, stop, run_manager, kwargs)
        return _result(drive(kept(choice, request), self._answer), self.kv.sampling(request))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request, choice = self._request(messages, stop, run_manager, kwargs)
        return _result(await adrive(kept(choice, request), self._aanswer), self.kv.sampling(request))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request, choice = self._request(messages, stop, run_manager, kwargs)
        with submitted(self.kv.submit, request) as stream:
            streamed = False
            for piece in stream:
                streamed = streamed or bool(piece.calls)
                for chunk in _chunks(piece):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield _last_chunk(choice.checked(stream.result()), self.kv.sampling(request), streamed=streamed)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request, choice = self._request(messages, stop, run_manager, kwargs)
        with submitted(self.kv.submit, request) as stream:
            streamed = False
            async for piece in stream:
                streamed = streamed or bool(piece.calls)
                for chunk in _chunks(piece):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield _last_chunk(choice.checked(stream.result()), self.kv.sampling(request), streamed=streamed)

    def _answer(self, request: Request) -> Generation:
        with submitted(self.kv.submit, request) as stream:
            generation: Generation = stream.result()
            return generation

    async def _aanswer(self, request: Request) -> Generation:
        with submitted(self.kv.submit, request) as stream:
            generation: Generation = await stream.aresult()
            return generation

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, run_manager: Any, options: dict[str, Any]
    ) -> tuple[Request, Choice]:
        unknown = sorted(set(options) - _PER_CALL)
        if unknown:
            raise ConfigError(
                f"this call knows no option {', '.join(unknown)}; it takes {', '.join(sorted(_PER_CALL))}"
            )
        tools = to_tools(options.get("tools") or (), strict=bool(options.get("strict")))
        choice = Choice.of(options.get("tool_choice"), tools)
        chosen = {name: options.get(name, getattr(self, name)) for name in _SAMPLING}
        stops = stop if stop is not None else options.get("stop", self.stop)
        caller = self.kv.caller()
        if caller.task == UNATTRIBUTED:
            caller = caller_of_metadata(getattr(run_manager, "metadata", None)) or handed.get() or caller
        request = Request(
            messages=to_messages(messages),
            tools=() if choice.none else tools,
            sampling=Sampling(
                stop=tuple([stops] if isinstance(stops, str) else stops or ()),
                **{name: value for name, value in chosen.items() if value is not None},
            ),
            caller=caller,
            session=options.get("session"),
            as_is=not options.get("context", self.context),
            tool_choice=choice.asked(parallel=options.get("parallel_tool_calls") is not False),
            response_format=format_of(options.get("response_format")),
            **self._rendering(options),
        )
        return request, choice

    def _rendering(self, options: dict[str, Any]) -> dict[str, Any]:
        """What is said about the prompt's template, here or in a call's options."""
        said = {name: options.get(name, getattr(self, name)) for name in _TEMPLATE}
        return {name: value for name, value in said.items() if value is not None}


def _named_in(told: RunnableConfig | None) -> Caller | None:
    return None if told is None else caller_of_metadata(told.get("metadata"))


def _result(generation: Generation, sampling: dict[str, Any]) -> ChatResult:
    message = to_ai_message(generation, sampling)
    return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model_name": generation.model})


def _chunks(piece: Chunk) -> Iterator[ChatGenerationChunk]:
    """A piece of an answer, with what was thought before it; one of a call has a chunk of its own."""
    if piece.text or piece.reasoning or not piece.calls:
        thought = {REASONING: piece.reasoning} if piece.reasoning else {}
        yield ChatGenerationChunk(message=AIMessageChunk(content=piece.text, additional_kwargs=thought))
    for delta in piece.calls:
        yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[to_call_chunk(delta)]))


def _last_chunk(generation: Generation, sampling: dict[str, Any], *, streamed: bool) -> ChatGenerationChunk:
    fields = turn_fields(generation, sampling)
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            tool_call_chunks=to_call_chunks(generation, streamed=streamed),
            chunk_position="last",
            **fields,
        ),
        generation_info={"finish_reason": generation.finish_reason},
    )
