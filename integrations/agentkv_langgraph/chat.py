"""ChatAgentKV: a LangChain chat model over an agentkv engine.

Covers invoke, ainvoke, stream, astream, bind_tools and per-call options. How messages are carried over is in
`messages.py`; budgets, bills and hints happen behind `kv.submit`.
"""
# ruff: noqa: A002, ARG002  argument names are LangChain's

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, Field

from agentkv.core.task import UNATTRIBUTED
from agentkv.engine.base import Chunk, Generation, Request, Sampling
from agentkv.errors import ConfigError
from agentkv_langgraph.caller import caller_of_metadata, named_in_metadata
from agentkv_langgraph.messages import to_ai_message, to_call_chunks, to_messages, to_tools, turn_fields

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_PER_CALL = {*_SAMPLING, "stop", "tools", "tool_choice", "session", "context", "stream", "stream_usage"}
_FREE_CHOICE = (None, "auto", "none")


class ChatAgentKV(BaseChatModel):
    """`ChatAgentKV(kv)`: the chat model that nodes call.

    Sampling options may be given here, with `.bind(...)`, or per call; the later one wins. Calls are attributed to
    whoever calls (`kv.task`, else the running graph). `usage_metadata` carries cached tokens, and
    `response_metadata["agentkv"]` the session and where the call's time went. With context=False messages are sent as
    they are: nothing is slimmed, folded or recalled.

    Raises ConfigError for an option that does not exist.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kv: Any = Field(exclude=True, repr=False)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    streaming: bool = False
    context: bool = True

    def __init__(self, kv: Any, **options: Any) -> None:
        unknown = sorted(set(options) - set(type(self).model_fields))
        if unknown:
            raise ConfigError(
                f"ChatAgentKV knows no option {', '.join(unknown)}; it takes {', '.join(_SAMPLING)}, stop, context"
            )
        super().__init__(kv=kv, **options)  # type: ignore[call-arg]

    @property
    def model_name(self) -> str:
        """The engine's model."""
        return str(self.kv.engine.model)

    @property
    def _llm_type(self) -> str:
        return "agentkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, "stop": self.stop, **{name: getattr(self, name) for name in _SAMPLING}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(ls_provider="agentkv", ls_model_name=self.model_name, ls_model_type="chat")

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. Only a free choice can be kept: "auto", or "none" to send no tools."""
        _check_choice(tool_choice)
        return super().bind(tools=to_tools(tools), tool_choice=tool_choice, **kwargs)

    # -- who calls: a config handed over explicitly names its task even in a thread that LangGraph does not know

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return super().invoke(input, _told(config), **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return await super().ainvoke(input, _told(config), **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, _told(config), **kwargs)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, _told(config), **kwargs)

    # -- the call

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self.kv.submit(self._request(messages, stop, run_manager, kwargs)) as stream:
            return _result(stream.result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self.kv.submit(self._request(messages, stop, run_manager, kwargs)) as stream:
            return _result(await stream.aresult())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self.kv.submit(self._request(messages, stop, run_manager, kwargs)) as stream:
            for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk
            yield _last_chunk(stream.result())

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with self.kv.submit(self._request(messages, stop, run_manager, kwargs)) as stream:
            async for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk
            yield _last_chunk(stream.result())

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, run_manager: Any, options: dict[str, Any]
    ) -> Request:
        unknown = sorted(set(options) - _PER_CALL)
        if unknown:
            raise ConfigError(
                f"this call knows no option {', '.join(unknown)}; it takes {', '.join(sorted(_PER_CALL))}"
            )
        _check_choice(options.get("tool_choice"))
        chosen = {name: options.get(name, getattr(self, name)) for name in _SAMPLING}
        stops = stop if stop is not None else options.get("stop", self.stop)
        caller = self.kv.caller()
        if caller.task == UNATTRIBUTED:
            caller = caller_of_metadata(getattr(run_manager, "metadata", None)) or caller
        return Request(
            messages=to_messages(messages),
            tools=() if options.get("tool_choice") == "none" else to_tools(options.get("tools") or ()),
            sampling=Sampling(
                stop=tuple([stops] if isinstance(stops, str) else stops or ()),
                **{name: value for name, value in chosen.items() if value is not None},
            ),
            caller=caller,
            session=options.get("session"),
            as_is=not options.get("context", self.context),
        )


def _check_choice(choice: Any) -> None:
    if choice not in _FREE_CHOICE:
        raise ConfigError(
            f"tool_choice={choice!r} cannot be enforced by this engine; leave it out or say 'auto' or 'none'"
        )


def _told(config: RunnableConfig | None) -> RunnableConfig | None:
    if config is None:
        return None
    told: Any = named_in_metadata(config)
    return told  # type: ignore[no-any-return]


def _result(generation: Generation) -> ChatResult:
    message = to_ai_message(generation)
    return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model_name": generation.model})


def _chunk(piece: Chunk) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=piece.text))


def _last_chunk(generation: Generation) -> ChatGenerationChunk:
    fields = turn_fields(generation)
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="", tool_call_chunks=to_call_chunks(generation), chunk_position="last", **fields
        ),
        generation_info={"finish_reason": generation.finish_reason},
    )
