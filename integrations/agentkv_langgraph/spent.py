"""What one LangChain model run used, from all that its callbacks show: chunks, the answer, or an error.

Covers usage told in chunks (LangChain adds them up, which counts growing and repeated ones many times), in the
message, in `llm_output` and in errors, answers out of LangChain's response cache, and counting where nothing is told.
Does not cover tries that a client repeats in silence (`tries.py`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from agentkv.context.tokens import count_at_once, count_text
from agentkv.core.reported import Reported, merged, report_in, reported
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv_langgraph.origin import Origin

_TOKENS_PER_MESSAGE = 4  # what a chat template adds around each message, about
_FIRST_ERROR = 400
_MOST = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
_AGAIN = "retry:attempt:"  # LangChain's tag of what `with_retry` runs
_MOST_CAUSES = 8
_USAGE = {"usage"}
_USUAL = {"input_tokens", "output_tokens", "total_tokens", "input_token_details"}
_USUAL_DETAILS = {"cache_read", "audio"}
_MOST_USUAL = 1_000_000
_LOST = (
    "CancelledError",
    "KeyboardInterrupt",
    "Timeout",
    "ReadError",
    "WriteError",
    "RemoteProtocolError",
    "ConnectionError",
)
_NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")


@dataclass(slots=True)
class ModelRun:
    """A model run on its way: who called, what was asked, and what came so far."""

    caller: Caller
    started_s: float
    run_id: UUID
    parent: UUID | None = None
    listed: int = 1  # how often each event of it comes
    heard: int = 0
    origin: Origin | None = None
    asked: str = ""
    prompt: Any = None
    tools: Any = None
    ours: bool = False
    through_door: bool = False  # it reached our engine after all, which has booked it
    began: bool = False
    raw: bool = False
    told: list[Any] = field(default_factory=list)
    counted_to: int = 0
    texts: list[str] = field(default_factory=list)
    most_tokens: int | None = None
    answers: int = 1
    is_retry: bool = False
    held: Any = None  # what its budget has set aside for it
    lost: bool = False
    refused: Exception | None = None

    @classmethod
    def started(cls, caller: Caller, now_s: float, prompt: Any, run: dict[str, Any]) -> ModelRun:
        """From the keyword arguments of a start callback."""
        asked = run.get("invocation_params") or {}
        about = run.get("metadata") or {}
        return cls(
            caller=caller,
            started_s=now_s,
            run_id=run["run_id"],
            parent=run.get("parent_run_id"),
            asked=str(asked.get("model") or asked.get("model_name") or about.get("ls_model_name") or ""),
            prompt=prompt,
            tools=asked.get("tools"),
            ours=about.get("ls_provider") == "agentkv",
            most_tokens=next(
                (most for name in _MOST if (most := asked.get(name)) is not None), about.get("ls_max_tokens")
            ),
            answers=asked.get("n") or 1,
            is_retry=any(str(tag).startswith(_AGAIN) and tag != f"{_AGAIN}1" for tag in run.get("tags") or ()),
        )

    def worst(self, unnamed_tokens: int) -> Usage:
        """What the call may use at most; `unnamed_tokens` are taken where it does not say how much it may write."""
        most = self.most_tokens if isinstance(self.most_tokens, int) else unnamed_tokens
        answers = self.answers if isinstance(self.answers, int) else 1
        return Usage(input_tokens=self.input_tokens(), output_tokens=max(0, most * answers), calls=1)

    def over(self) -> None:
        """It is recorded: nothing is set aside for it any more."""
        if self.held is not None:
            self.held.release()

    def hears(self) -> bool:
        """Whether an event that comes as often as the handler is listed is to be looked at now."""
        self.heard = (self.heard + 1) % self.listed
        return not self.heard

    def chunk(self, token: Any, chunk: Any) -> None:
        """Note what a chunk brings."""
        message = getattr(chunk, "message", None)
        parts = [token] if isinstance(token, str) else [str(getattr(message, "text", "") or "")]
        for call in getattr(message, "tool_call_chunks", None) or ():
            parts += [call.get("name") or "", call.get("args") or ""]
        thought = (getattr(message, "additional_kwargs", None) or {}).get("reasoning_content")
        parts.append(thought if isinstance(thought, str) else "")
        self.texts += [part for part in parts if part]
        self.raw = self.raw or (getattr(message, "response_metadata", None) or {}).get("model_provider") == "openai"
        usage = getattr(message, "usage_metadata", None)
        if usage:
            self.told.append(usage)
            self.counted_to = len(self.texts)

    def ended(self, result: LLMResult) -> tuple[Reported | None, str]:
        """What the answer used, and the model's name; None where LangChain's response cache answered."""
        message, info, output = _first(result)
        about = {**(info or {}), **getattr(message, "response_metadata", {})}
        model = str(
            about.get("model_name") or output.get("model_name") or about.get("model") or self.asked or "unknown"
        )
        usage = getattr(message, "usage_metadata", None)
        if usage and usage.get("total_cost") == 0:
            return None, model
        tier = {"service_tier": about.get("service_tier") or output.get("service_tier")}
        read = self._from_chunks(usage, tier)
        for told in () if read is not None and self.told else (output, about, {"usage": usage}):
            if read is not None and not read.estimated:
                break
            found = {**report_in(told), **_inside(told)}
            more = None
            if found:
                more = (
                    usual(found.get("usage")) if found.keys() == _USAGE and not tier["service_tier"] else None
                ) or reported({**found, **tier})
            if more is not None and (read is None or not more.estimated):
                read = more
        if read is None or not read.usage.input_tokens or (not read.usage.output_tokens and self._written(message)):
            read = self._counted(message, read)
        return read, model

    def _from_chunks(self, usage: Any, tier: dict[str, Any]) -> Reported | None:
        """Usage that came in several chunks. The same input twice means that each chunk tells of the whole."""
        if not self.told:
            return None
        inputs = [one.get("input_tokens") for one in self.told if one.get("input_tokens")]
        whole: dict[str, Any] = {}
        if self.raw or (len(inputs) > 1 and len(set(inputs)) == 1):
            for one in self.told:
                whole = merged(whole, one)
        else:
            whole = dict(usage or self.told[-1])
        read = reported({"usage": whole, **tier})
        if read is None or not any(text.strip() for text in self.texts[self.counted_to :]):
            return read
        said = max(read.usage.output_tokens, self._count("".join(self.texts)))
        return replace(read, usage=replace(read.usage, output_tokens=said), estimated=True)

    def failed(self, error: BaseException, result: LLMResult | None) -> Reported:
        """What a run that failed used, as far as can be known: nothing where the server refused or was not reached."""
        completion = reported(report_in(getattr(error, "completion", None)))
        if completion is not None:
            return completion
        if self.began:
            told = _first(result)[0] if result is not None else None
            read = self._from_chunks(getattr(told, "usage_metadata", None), {})
            return read if read is not None and read.usage.input_tokens else self._counted(None, read)
        if any(_refused(one) for one in causes(error)) or not _lost(error):
            return Reported(usage=Usage())
        return Reported(usage=Usage(input_tokens=self.input_tokens(), calls=1), estimated=True)

    # -- counting

    def input_tokens(self) -> int:
        """The prompt's tokens, counted here."""
        if isinstance(self.prompt, str):
            return self._count(self.prompt)
        tools = sum(self._count(json.dumps(tool)) for tool in self.tools or () if isinstance(tool, dict))
        messages = self.prompt or ()
        return tools + sum(self._message(message) for message in messages) + _TOKENS_PER_MESSAGE * (len(messages) + 1)

    def _counted(self, message: Any, read: Reported | None) -> Reported:
        """`read` with what it does not say counted here; all of it where nothing was read."""
        usage = Usage(calls=1) if read is None else read.usage
        output = usage.output_tokens or self._count(self._written(message))
        usage = replace(usage, input_tokens=usage.input_tokens or self.input_tokens(), output_tokens=output)
        tier = "" if read is None else read.service_tier
        return Reported(usage=usage, estimated=True, service_tier=tier)

    def _written(self, message: Any) -> str:
        if self.texts:
            return "".join(self.texts)
        return "".join(_texts(message)) if message is not None else ""

    def _message(self, message: Any) -> int:
        return sum(self._count(text) for text in _texts(message))

    def _count(self, text: str) -> int:
        count = count_text if asyncio._get_running_loop() is None else count_at_once
        return count(text, self.asked or None)


def usual(usage: Any) -> Reported | None:
    """What `reported` reads in LangChain's usage where it is of the usual kind, in a tenth of the time; else None."""
    if type(usage) is not dict or not usage.keys() <= _USUAL:
        return None
    read, said = usage.get("input_tokens"), usage.get("output_tokens")
    details = usage.get("input_token_details") or {}
    cached = details.get("cache_read") or 0 if type(details) is dict and details.keys() <= _USUAL_DETAILS else None
    if not type(read) is type(said) is type(cached) is int or usage.get("total_tokens") != read + said:
        return None
    if not 0 <= cached <= read or not 0 < read < _MOST_USUAL or not 0 < said < _MOST_USUAL:
        return None
    spent = Usage(input_tokens=read, cached_tokens=cached, output_tokens=said, calls=1)
    return Reported(usage=spent, cached_by={"provider": cached} if cached else {})


def _texts(message: Any) -> list[str]:
    """What a model reads or writes in a message."""
    if not isinstance(message, BaseMessage):
        return [message if isinstance(message, str) else str(getattr(message, "text", ""))]
    calls = getattr(message, "tool_calls", None) or ()
    thought = message.additional_kwargs.get("reasoning_content")
    return [
        str(message.text),
        *(call["name"] + json.dumps(call["args"]) for call in calls),
        *([thought] if isinstance(thought, str) else []),
    ]


def _first(result: LLMResult) -> tuple[Any, dict[str, Any] | None, dict[str, Any]]:
    """The first answer (a message, or a generation that has only text), what is told of it, and of the whole."""
    output = result.llm_output or {}
    for answers in result.generations:
        if answers:
            return getattr(answers[0], "message", answers[0]), answers[0].generation_info, output
    return None, None, output


def _inside(told: Any) -> dict[str, Any]:
    usage = told.get("token_usage") if isinstance(told, dict) else None
    return {"usage": usage} if usage else {}


def causes(error: BaseException | None) -> list[BaseException]:
    """The error and what lies behind it: frameworks wrap what their clients wrap."""
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < _MOST_CAUSES:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _refused(error: BaseException) -> bool:
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and status >= _FIRST_ERROR


def _lost(error: BaseException) -> bool:
    """Whether the request was on its way when it failed: the server may have done the work."""
    names = [type(one).__name__ for one in causes(error)]
    return not any(name in _NOT_SENT for name in names) and any(part in name for name in names for part in _LOST)
