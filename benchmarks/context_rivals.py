"""The others, driven through the same loop with the same fake model, each called as its documentation says.

Covers langchain (SummarizationMiddleware, ContextEditingMiddleware), deepagents (summarisation, and with it the
eviction of large tool results), astromesh-context, ctx-slim, foldback-ai, and doing nothing. Each has its default and
a few settings for a loop of this size. One that is not installed is skipped and says so.
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from context_brain import Brain, Meter, Run, Sent, result, wire_call
from context_loops import TOOL_DESCRIPTION, TOOL_NAME, Loop

Setting = tuple[str, Callable[[Brain], None]]


def runs(loop: Loop, only: str = "") -> Iterator[Run]:
    """Every rival in every setting."""
    logging.getLogger("astromesh_context").setLevel(logging.ERROR)
    for name, settings in _RIVALS.items():
        if only and only not in name:
            continue
        try:
            made = list(settings())
        except ImportError as missing:
            yield Run(name=name, loop=loop.name, setting="", skipped=f"{missing.name or missing} is not installed")
            continue
        for setting, play in made:
            brain = Brain(loop, Meter(loop))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    play(brain)
            except Exception as error:  # a rival that gives up is a result too
                yield Run(name=name, loop=loop.name, setting=setting, skipped=f"failed: {error!r:.120}")
                continue
            yield result(name, setting, brain)


# -- a plain loop over OpenAI's messages


def _plain(shorten: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], *, keep: bool) -> Callable[[Brain], None]:
    """`shorten` is applied before each call; with `keep` its answer is the conversation from then on."""

    def play(brain: Brain) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": brain.loop.system},
            {"role": "user", "content": brain.loop.request},
        ]
        for number in itertools.count():
            sent = shorten(messages)
            messages = list(sent) if keep else messages
            turn = brain.answer([_of_dict(message) for message in sent], _TOOLS)
            if turn.command is None:
                return
            ((key, name, arguments),) = wire_call(turn, number)
            call = {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": turn.text, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": key, "content": brain.output(turn.command)})

    return play


_TOOLS = json.dumps({"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": {"command": "string"}})


def _of_dict(message: dict[str, Any]) -> Sent:
    calls = tuple(
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Sent(
        role=message["role"], content=message.get("content") or "", calls=calls,
        call_id=message.get("tool_call_id") or "",
    )  # fmt: skip


def _nothing() -> Iterator[Setting]:
    yield "", _plain(lambda messages: messages, keep=True)


def _ctx_slim() -> Iterator[Setting]:
    from context_slim import CacheAlignedContext

    def pruned(preset: str, horizon: int | None, model: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        def prune(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            context = CacheAlignedContext(messages, model=model, preset=preset)
            return context.apply(context.plan(horizon=horizon))[0]

        return prune

    luna, free = "openai/gpt-5.6-luna", "openai/legacy-no-write-premium"
    yield "balanced (default)", _plain(pruned("balanced", None, luna), keep=True)
    yield "cache-preserving", _plain(pruned("cache-preserving", None, luna), keep=True)
    yield "aggressive, horizon 40", _plain(pruned("aggressive", 40, luna), keep=True)
    yield "aggressive, horizon 100, no write premium", _plain(pruned("aggressive", 100, free), keep=True)


def _foldback() -> Iterator[Setting]:
    from foldback import compress

    def fold(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(compress(messages).messages)  # with model= it asks the network for tiktoken's file

    yield "as the client wrapper does (default)", _plain(fold, keep=False)
    yield "answer kept as the history", _plain(fold, keep=True)


# -- create_agent


def _agent(make: Callable[[Any], list[Any]]) -> Callable[[Brain], None]:
    """`make` gets the chat model and answers with the middleware."""

    def play(brain: Brain) -> None:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool

        model = _chat_model(brain)
        tool = StructuredTool.from_function(
            func=brain.output,
            name=TOOL_NAME,
            description=TOOL_DESCRIPTION,
            args_schema={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        )
        agent = create_agent(model, tools=[tool], system_prompt=brain.loop.system, middleware=make(model))
        config = {"recursion_limit": 100_000, "configurable": {"thread_id": str(uuid.uuid4())}}
        agent.invoke({"messages": [{"role": "user", "content": brain.loop.request}]}, config)

    return play


def _chat_model(brain: Brain) -> Any:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langchain_core.utils.function_calling import convert_to_openai_tool

    class Recorded(BaseChatModel):
        numbers: Any = itertools.count()

        @property
        def _llm_type(self) -> str:
            return "recorded"

        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            rows = [json.dumps(convert_to_openai_tool(tool)["function"], sort_keys=True) for tool in tools]
            return self.bind(tool_text="\n".join(rows), **{k: v for k, v in kwargs.items() if v is not None})

        def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> Any:
            turn = brain.answer([_of_langchain(message) for message in messages], kwargs.get("tool_text", ""))
            calls = [
                {"id": key, "name": name, "args": json.loads(arguments), "type": "tool_call"}
                for key, name, arguments in wire_call(turn, next(self.numbers))
            ]
            return ChatResult(generations=[ChatGeneration(message=AIMessage(content=turn.text, tool_calls=calls))])

    return Recorded()


_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def _of_langchain(message: Any) -> Sent:
    calls = tuple((c["id"], c["name"], json.dumps(c["args"])) for c in getattr(message, "tool_calls", ()) or ())
    return Sent(
        role=_ROLES[message.type], content=str(message.text), calls=calls,
        call_id=getattr(message, "tool_call_id", "") or "",
    )  # fmt: skip


def _summarization() -> Iterator[Setting]:
    from langchain.agents.middleware import SummarizationMiddleware

    def made(**options: Any) -> Callable[[Brain], None]:
        return _agent(lambda model: [SummarizationMiddleware(model, **options)])

    yield "trigger 8k, keep 20, trim 4k (defaults)", made(trigger=("tokens", 8000))
    for trigger, keep in ((6000, 4), (8000, 2), (8000, 6), (8000, 20), (10_000, 2), (12_000, 6), (16_000, 10)):
        options = {"trigger": ("tokens", trigger), "keep": ("messages", keep), "trim_tokens_to_summarize": None}
        yield f"trigger {trigger // 1000}k, keep {keep}, no trim", made(**options)


def _editing() -> Iterator[Setting]:
    from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware

    def made(**options: Any) -> Callable[[Brain], None]:
        return _agent(lambda _: [ContextEditingMiddleware(edits=[ClearToolUsesEdit(**options)])])

    yield "trigger 100k, keep 3 (defaults)", made()
    yield "trigger 4k, keep 3", made(trigger=4000)
    yield "trigger 8k, keep 10", made(trigger=8000, keep=10)
    yield "trigger 8k, keep 3, clear at least 5k", made(trigger=8000, clear_at_least=5000)


def _deepagents() -> Iterator[Setting]:
    from deepagents.backends import FilesystemBackend
    from deepagents.middleware.filesystem import FilesystemMiddleware
    from deepagents.middleware.summarization import SummarizationMiddleware, create_summarization_middleware

    folder = tempfile.mkdtemp(prefix="agentkv-bench-")
    backend = FilesystemBackend(root_dir=folder, virtual_mode=True)

    def both(model: Any) -> list[Any]:
        return [FilesystemMiddleware(backend=backend), create_summarization_middleware(model, backend)]

    yield "its defaults, with its file tools", _agent(both)

    def made(trigger: int, keep: int, evict: int | None) -> Callable[[Brain], None]:
        def middleware(model: Any) -> list[Any]:
            summing = SummarizationMiddleware(
                model, backend=backend, trigger=("tokens", trigger), keep=("messages", keep),
                trim_tokens_to_summarize=None,
            )  # fmt: skip
            if evict is None:
                return [summing]
            return [FilesystemMiddleware(backend=backend, tool_token_limit_before_evict=evict), summing]

        return _agent(middleware)

    for trigger, keep in ((8000, 2), (8000, 6), (8000, 20), (16_000, 6)):
        yield f"trigger {trigger // 1000}k, keep {keep}", made(trigger, keep, None)
    for trigger, keep, evict in ((8000, 2, 1000), (10_000, 2, 2000), (12_000, 6, 2000), (12_000, 6, 400)):
        yield f"trigger {trigger // 1000}k, keep {keep}, evict above {evict}", made(trigger, keep, evict)


def _astromesh() -> Iterator[Setting]:
    from astromesh_context.integrations.langchain import ContextMiddleware, LangChainAdapter, offload_tools
    from astromesh_context.loop import Compactor, Offloader, summary_prompt
    from langchain_core.messages import HumanMessage

    def made(threshold: int, keep: int, limit: int, preview: int) -> Callable[[Brain], None]:
        def middleware(model: Any) -> list[Any]:
            async def summarize(old: list[Any]) -> str:
                prompt = HumanMessage(summary_prompt(old, LangChainAdapter()))
                return str((await model.ainvoke([prompt])).text)

            offloader = Offloader(max_tokens=limit, preview_tokens=preview)
            compactor = Compactor(summarize, threshold_tokens=threshold, keep_last=keep)
            offloading = ContextMiddleware(compactor=compactor, offloader=offloader)
            offloading.tools = offload_tools(offloader)
            return [offloading]

        return _agent(middleware)

    yield "threshold 6k, keep 6, offload 1500/200 (as documented)", made(6000, 6, 1500, 200)
    for threshold, keep, limit, preview in ((6000, 2, 1500, 200), (8000, 2, 1500, 200), (12_000, 6, 1500, 200)):
        yield (
            f"threshold {threshold // 1000}k, keep {keep}, offload {limit}/{preview}",
            made(threshold, keep, limit, preview),
        )
    for limit, preview in ((1500, 200), (400, 200), (250, 150), (120, 60)):
        yield f"never compact, offload {limit}/{preview}", made(10**9, 6, limit, preview)
    yield "threshold 12k, keep 6, offload 250/150", made(12_000, 6, 250, 150)


_RIVALS: dict[str, Callable[[], Iterator[Setting]]] = {
    "doing nothing": _nothing,
    "langchain SummarizationMiddleware": _summarization,
    "langchain ContextEditingMiddleware": _editing,
    "deepagents": _deepagents,
    "astromesh-context": _astromesh,
    "ctx-slim": _ctx_slim,
    "foldback-ai": _foldback,
}
