"""Request: one model call, and how its tokens are chosen. The answer's side is `base.py`.

Covers the values, and `refuse_unless`: how an engine says that it cannot do what a request asks. Every default means
"nothing asked". Does not cover: which engine can do what (each passes its own list).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentkv.core.message import ROLES, Message, ToolSpec
from agentkv.core.task import Caller, PriorityClass
from agentkv.engine.extras import check_extras, of_the_prompt
from agentkv.errors import RequestInvalid

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
"""OpenAI's own limits."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""How much a model may be asked to think, in OpenAI's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens. temperature 0 is greedy. `max_tokens` None means up to the context's end.

    `logit_bias` holds (token id, amount): the amount, in [-100, 100], is added to that token's logit before anything
    else. The penalties, in [-2, 2], are taken off the logits of tokens that this answer has written already: once
    (presence), and once for each time (frequency). Raises RequestInvalid for a value that no engine could work with,
    so that none ever sees one; that an id lies in the vocabulary is the engine's to check.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens, low=1), "max_tokens", self.max_tokens, "an integer from 1 on")
        _require(_is_real(self.temperature, 0, 100), "temperature", self.temperature, "a number from 0 on")
        _require(_is_real(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        stops = self.stop if isinstance(self.stop, tuple) else (None,)
        _require(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "a tuple of texts that are not empty")
        _require(_is_int(self.seed, low=-(2**63)), "seed", self.seed, "an integer of 64 bits")
        if self.logit_bias:
            allowed = all(_is_int(id_, low=0) and _is_real(by, -100, 100) for id_, by in self.logit_bias)
            _require(allowed, "logit_bias", self.logit_bias, "token ids, each with a number in [-100, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value, -2, 2), name, value, "a number in [-2, 2]")

    def told(self) -> dict[str, Any]:
        """How tokens are chosen, as JSON values: temperature and top_p, and what else was asked for."""
        told: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        if self.seed is not None:
            told["seed"] = self.seed
        penalties = {name: getattr(self, name) for name in ("presence_penalty", "frequency_penalty")}
        told |= {name: value for name, value in penalties.items() if value}
        return told | ({"logit_bias": len(self.logit_bias)} if self.logit_bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which of a request's tools the answer calls.

    "auto": the model decides. "none": no call; what looks like one is text. "required": at least one call, and nothing
    else. `names` narrows both "auto" and "required" to these tools (one name with "required" is OpenAI's named choice).
    With parallel=False there is at most one call.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The answer's text is one JSON value: valid under `schema`, or any object where that is None.

    `strict`: an engine that cannot hold the whole schema refuses (RequestInvalid, param "response_format"); else it
    holds what it can. An answer that ends with "length" may be cut anywhere. `name` is for the model's eyes only.
    `plain`: the prompt itself says what is wanted, so another endpoint is asked for any JSON object only.
    """

    schema: Mapping[str, Any] | None = None
    name: str = ""
    strict: bool = True
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call: `messages` (rendered by the model's chat template) or a raw `prompt`, exactly one of them.

    `session` joins a known session; None lets the engine find it (longest common prefix inside the task).
    `forced_ids` makes the model emit exactly these token ids (a replay, or a test); then nothing is sampled.
    `as_is`: the messages are sent as they are, whatever the runtime's context options say. `purpose` is for the bill:
    a "summary" is a call that the runtime makes for itself.

    `n` choices are computed from one prompt, whose tokens are counted once; with a seed they still differ from each other.
    `logprobs` None: none are told; k: for every token of the text its log probability and those of the k likeliest
    tokens (0 to 20). `continue_final_message`: the last message is an assistant's and its text is gone on with: no new
    turn begins, and the answer holds only what is new. `salt` is a tenant's secret, beside the engine's own: KV is
    found only under the same one; it comes from who let the caller in, never from the caller.

    `reasoning_effort` (one of EFFORTS): how much the model thinks before it answers; None: as it does by itself.
    `chat_template_kwargs`: further variables of the model's chat template, as JSON values.

    `extra_body` and `extra_headers`: what a server elsewhere is told besides, as it is (`extras.py`: bounded, none of the
    fields above under their wire names, no header of a connection or of a key). They win over what we add.
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    caller: Caller = field(default_factory=Caller)
    session: str | None = None
    priority: PriorityClass = PriorityClass.STEP
    forced_ids: tuple[int, ...] | None = None
    as_is: bool = False
    purpose: Literal["answer", "summary"] = "answer"
    fold: bool = False
    n: int = 1
    logprobs: int | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: ResponseFormat | None = None
    continue_final_message: bool = False
    salt: str = ""
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    extra_headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise RequestInvalid("a request holds either messages or a prompt", param="messages")
        if self.messages is not None and not self.messages:
            raise RequestInvalid("messages are empty; at least one is needed", param="messages")
        for number, message in enumerate(self.messages or ()):
            if not isinstance(message, Message) or message.role not in ROLES:
                raise RequestInvalid(
                    f"messages[{number}]={message!r:.100} is not allowed; give an agentkv.Message with a role of "
                    f"{', '.join(ROLES)}",
                    param="messages",
                )
        most = f"an integer from 1 to {MOST_CHOICES}"
        _require(self.n is not None and _is_int(self.n, low=1) and self.n <= MOST_CHOICES, "n", self.n, most)
        top = f"an integer from 0 to {MOST_TOP_LOGPROBS}"
        _require(
            _is_int(self.logprobs, low=0) and (self.logprobs or 0) <= MOST_TOP_LOGPROBS, "logprobs", self.logprobs, top
        )
        self._check_tools()
        self._check_template()
        check_extras(self.extra_body, self.extra_headers)
        last = (self.messages or (None,))[-1]
        if self.continue_final_message and (last is None or last.role != "assistant" or last.tool_calls):
            raise RequestInvalid(
                "continue_final_message needs an assistant's message without tool calls as the last one",
                param="continue_final_message",
                code="invalid_value",
            )

    def _check_template(self) -> None:
        effort, variables = self.reasoning_effort, self.chat_template_kwargs
        _require(effort is None or effort in EFFORTS, "reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
        if not (
            isinstance(variables, Mapping) and all(isinstance(name, str) for name in variables) and _is_json(variables)
        ):
            raise RequestInvalid(
                "chat_template_kwargs must be an object: JSON values, not nested too deeply, by the template's names for them",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        if self.messages is None and (effort is not None or variables):
            param = "reasoning_effort" if effort is not None else "chat_template_kwargs"
            raise RequestInvalid(
                f"{param} is for messages: a prompt is sent as it is", param=param, code="invalid_value"
            )

    @property
    def rendering(self) -> dict[str, Any]:
        """Fields that say how the prompt is rendered and kept: of a request that is to share this one's prompt."""
        said = {"reasoning_effort": self.reasoning_effort, "chat_template_kwargs": self.chat_template_kwargs}
        return said | ({"extra_body": of_the_prompt(self.extra_body)} if self.extra_body else {})

    def _check_tools(self) -> None:
        choice, known = self.tool_choice, {tool.name for tool in self.tools}
        missing = [name for name in choice.names if name not in known]
        if missing:
            told = f"tool_choice names {missing[0]!r:.60}, which is not among the tools"
            raise RequestInvalid(told, param="tool_choice", code="invalid_value")
        if choice.mode == "required" and not self.tools:
            raise RequestInvalid(
                "tool_choice requires a call, but there are no tools", param="tool_choice", code="invalid_value"
            )


_ASKED: dict[str, Callable[[Request], bool]] = {
    "n": lambda request: request.n != 1,
    "logprobs": lambda request: request.logprobs is not None,
    "logit_bias": lambda request: bool(request.sampling.logit_bias),
    "presence_penalty": lambda request: request.sampling.presence_penalty != 0,
    "frequency_penalty": lambda request: request.sampling.frequency_penalty != 0,
    "tool_choice": lambda request: request.tool_choice.mode == "required" or bool(request.tool_choice.names),
    "parallel_tool_calls": lambda request: bool(request.tools) and not request.tool_choice.parallel,
    "tools.strict": lambda request: any(tool.strict for tool in request.tools),
    "response_format": lambda request: request.response_format is not None,
    "continue_final_message": lambda request: request.continue_final_message,
    "salt": lambda request: bool(request.salt),
    "reasoning_effort": lambda request: request.reasoning_effort is not None,
    "chat_template_kwargs": lambda request: bool(request.chat_template_kwargs),
    "extra_body": lambda request: bool(request.extra_body),
    "extra_headers": lambda request: bool(request.extra_headers),
}  # fmt: skip
"""What not every engine can do, and when a request asks for it."""

FEATURES = frozenset(_ASKED)


def refuse_unless(request: Request, can: frozenset[str], *, engine: str) -> None:
    """Raise RequestInvalid naming the first thing that `request` asks for and that is not in `can` (of FEATURES)."""
    for name, asks in _ASKED.items():
        if name not in can and asks(request):
            raise RequestInvalid(f"{name} is not supported by {engine}", param=name, code="unsupported_value")


def changed(request: Request, **changes: Any) -> Request:
    """`request` with other values that are known to be allowed: nothing is looked at again, however long it is."""
    copy = object.__new__(Request)
    for name in Request.__slots__:
        object.__setattr__(copy, name, changes.pop(name) if name in changes else getattr(request, name))
    if changes:
        raise TypeError(f"a Request has no {', '.join(changes)}")
    return copy


def _require(allowed: bool, param: str, value: object, what: str) -> None:
    if not allowed:
        raise RequestInvalid(f"{param}={value!r:.100} is not allowed; give {what}", param=param, code="invalid_value")


def _is_int(value: object, *, low: int) -> bool:
    """None, or an integer that also fits into 64 bits."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63)


def _is_json(values: Mapping[str, Any]) -> bool:
    try:
        json.dumps(dict(values))
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_real(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
