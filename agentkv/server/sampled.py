"""Reading how an answer is to be chosen: the fields that chats, completions and responses share.

Covers sampling, choices, log probabilities, formats, tool choice. Each endpoint's own fields are `requests.py` and
`responses.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from agentkv.core.message import ToolSpec
from agentkv.engine.request import ResponseFormat, Sampling, ToolChoice
from agentkv.errors import RequestInvalid
from agentkv.server.fields import Fields, kind_of, refuse

HARMLESS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
"""Book-keeping of the sender's account with a hosted service; our cache needs no key."""

STOP_LIMIT = 16
BIAS_LIMIT = 1024
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's own default: the same code gives the same kind of answer here and there."""
_ONLY_TOOLS = "only functions can be called"


def read_sampling(
    fields: Fields, *, limits: tuple[str, ...], default_max_tokens: int | None = None, penalties: bool = True
) -> Sampling:
    """How tokens are chosen. `limits` are the names under which the most tokens may come, the preferred one first."""
    given: dict[str, Any] = {
        "temperature": fields.any("temperature", DEFAULT_TEMPERATURE),
        "top_p": fields.any("top_p", 1.0),
    }
    name, most = _limit(fields, limits, default_max_tokens)
    if penalties:
        given |= {
            "seed": fields.any("seed"),
            "stop": _stop(fields.any("stop", [])),
            "logit_bias": _bias(fields.any("logit_bias", {})),
            "presence_penalty": fields.any("presence_penalty", 0.0),
            "frequency_penalty": fields.any("frequency_penalty", 0.0),
        }
    try:
        return Sampling(max_tokens=most, **given)
    except RequestInvalid as error:
        if error.param != "max_tokens" or name == "max_tokens":
            raise
        raise RequestInvalid(str(error).replace("max_tokens", name, 1), param=name, code=error.code) from error


def _limit(fields: Fields, names: tuple[str, ...], default: int | None) -> tuple[str, Any]:
    given = [(name, value) for name in names if (value := fields.any(name)) is not None]
    if len(given) > 1 and given[0][1] != given[1][1]:
        (new, one), (old, other) = given
        refuse(old, f"is {other!r:.20} while {new} is {one!r:.20}; give one of them")
    return given[0] if given else (names[0], default)


def _stop(stop: Any) -> tuple[Any, ...]:
    marks = [stop] if isinstance(stop, str) else stop
    if not isinstance(marks, list):
        refuse("stop", "must be a text or a list of texts", code="invalid_type")
    if len(marks) > STOP_LIMIT:
        refuse("stop", f"holds {len(marks)} texts; at most {STOP_LIMIT} are allowed")
    return tuple(marks)


def _bias(bias: Any) -> tuple[tuple[int, Any], ...]:
    if not isinstance(bias, dict):
        refuse("logit_bias", f"must be an object, not {kind_of(bias)}", code="invalid_type")
    if len(bias) > BIAS_LIMIT:
        refuse("logit_bias", f"holds {len(bias)} tokens; at most {BIAS_LIMIT} are allowed")
    for name in bias:
        if not (name.isascii() and name.isdecimal() and int(name) < 2**31):
            refuse("logit_bias", f"has the name {name!r:.40}, which is no token id")
    return tuple((int(name), amount) for name, amount in bias.items())


def read_n(fields: Fields) -> int:
    """How many choices; what is no number from 1 on is the Request's to refuse."""
    n: Any = fields.any("n", 1)
    return n  # type: ignore[no-any-return]


def read_chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` and `top_logprobs` of a chat."""
    wanted = fields.flag("logprobs", default=False)
    return wanted_logprobs(wanted, fields.any("top_logprobs"), only_with="logprobs=true")


def wanted_logprobs(wanted: bool, top: Any, *, only_with: str) -> int | None:
    """How many of the likeliest tokens are told, None for no log probabilities. `top`: the field `top_logprobs`."""
    if wanted:
        return 0 if top is None else _top(top)
    if top not in (None, 0) or isinstance(top, bool):
        refuse("top_logprobs", f"is only allowed with {only_with}")
    return None


def _top(top: Any) -> int:
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:  # noqa: PLR2004  OpenAI's limit
        refuse("top_logprobs", f"is {top!r:.40}; give an integer from 0 to 20")
    return int(top)


def read_format(value: Any, path: str) -> ResponseFormat | None:
    """A chat's `response_format`, or the `text.format` of a response: there the schema lies one floor higher."""
    if value is None:
        return None
    fields = Fields(value, path)
    kind = fields.text("type")
    if kind == "text":
        fields.end()
        return None
    if kind == "json_object":
        fields.end()
        return ResponseFormat()
    if kind != "json_schema":
        refuse(fields.at("type"), f"{kind!r:.40} is not one of text, json_object, json_schema")
    inner = fields
    if path == "response_format":
        inner = Fields(fields.any("json_schema"), fields.at("json_schema"))
        fields.end()
    name, schema = inner.text("name"), inner.any("schema", {})
    inner.text("description", "")
    strict = inner.flag("strict", default=False)
    if not isinstance(schema, dict):
        refuse(inner.at("schema"), f"must be an object, not {kind_of(schema)}", code="invalid_type")
    inner.end()
    return ResponseFormat(schema=schema, name=name, strict=strict)


def read_tool_choice(fields: Fields, tools: tuple[ToolSpec, ...], *, flat: bool) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. `flat`: a named tool's name stands beside its type, as in responses."""
    parallel = fields.flag("parallel_tool_calls", default=True)
    choice = fields.any("tool_choice", "auto")
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            refuse("tool_choice", f"{choice!r:.40} is not one of auto, none, required, nor a named tool")
        return ToolChoice(mode=choice, parallel=parallel) if tools or choice == "required" else ToolChoice()  # type: ignore[arg-type]
    return _narrowed(Fields(choice, "tool_choice"), parallel, flat=flat)


def _narrowed(choice: Fields, parallel: bool, *, flat: bool) -> ToolChoice:
    kind = choice.text("type")
    if kind == "function":
        name = _tool_name(choice, flat=flat)
        return ToolChoice(mode="required", names=(name,), parallel=parallel)
    if kind != "allowed_tools":
        refuse(choice.at("type"), f"{kind!r:.40} is not supported: {_ONLY_TOOLS}", code="unsupported_value")
    inner = choice
    if not flat:
        inner = Fields(choice.any("allowed_tools"), choice.at("allowed_tools"))
        choice.end()
    mode = inner.text("mode")
    if mode not in ("auto", "required"):
        refuse(inner.at("mode"), f"{mode!r:.40} is not one of auto, required")
    names = []
    for index, item in enumerate(inner.items("tools") or []):
        tool = Fields(item, f"{inner.at('tools')}[{index}]")
        tool.only("type", "function", why=_ONLY_TOOLS)
        names.append(_tool_name(tool, flat=flat))
    inner.end()
    if not names:
        refuse(inner.at("tools"), "must name at least one tool")
    allowed: Literal["auto", "required"] = "required" if mode == "required" else "auto"
    return ToolChoice(mode=allowed, names=tuple(names), parallel=parallel)


def _tool_name(fields: Fields, *, flat: bool) -> str:
    inner = fields if flat else Fields(fields.any("function"), fields.at("function"))
    name = inner.text("name")
    inner.end()
    fields.end()
    return name
