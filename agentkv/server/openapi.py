"""The OpenAPI document of the app: what may be sent, and what comes back.

Written by hand beside the readers of the same bodies: it holds their limits, so that a generator of requests finds what
they accept and what they refuse. Replies are described by the fields that callers count on.
"""

from __future__ import annotations

from typing import Any

from agentkv.engine.request import EFFORTS, MOST_CHOICES, MOST_TOP_LOGPROBS
from agentkv.hints.wire import ACTION, VERSION
from agentkv.server.requests import MOST_COMPLETION_LOGPROBS, MOST_HINTS
from agentkv.server.sampled import STOP_LIMIT

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 64}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {"type": "object"}
_MOST_INTEGER = 2**63 - 1


def document(model: str) -> dict[str, Any]:
    """OpenAPI 3.1 for an app that serves `model`."""
    schemas = _shared() | _asked(model) | _told()
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentkv", "version": "1", "description": "OpenAI's endpoints over one engine, and hints."},
        "security": [{}, {"key": []}],
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {"post": _post("ChatRequest", "Chat", "A chat completion", streams=True)},
        "/v1/completions": {"post": _post("CompletionRequest", "Completion", "A text completion", streams=True)},
        "/v1/responses": {"post": _post("ResponseRequest", "Response", "A response", streams=True)},
        "/tokenize": {
            "post": _post({"anyOf": [_ref("ChatRequest"), _ref("CompletionRequest")]}, "Count", "Tokens of a prompt")
        },
        "/v1/models": {"get": _get("Models", "The model that is served")},
        "/v1/models/{name}": {
            "get": _get("Model", "One model")
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _NAME}]}
        },
        "/health": {"get": _get("Health", "Whether calls are taken", also=("503",))},
        "/v1/agentkv/hints": {"post": _post("Hints", "Receipts", "Tell of a wait", also=("404",))},
        "/v1/tokencake/events": {"post": _post("Event", "EventTaken", "A stall of a call", also=("404", "409"))},
    }


def _post(asked: str | Schema, told: str, summary: str, *, streams: bool = False, also: tuple[str, ...] = ()) -> Schema:
    schema = _ref(asked) if isinstance(asked, str) else asked
    content: Schema = {"application/json": {"schema": _ref(told)}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(*also)},
    }


def _get(told: str, summary: str, *, also: tuple[str, ...] = ()) -> Schema:
    ok = {"description": "the answer", "content": {"application/json": {"schema": _ref(told)}}}
    errors = _errors(*(() if told == "Health" else also))
    unwell = {"503": {"description": "draining", "content": {"application/json": {"schema": _ref(told)}}}}
    return {"summary": summary, "responses": {"200": ok, **errors, **(unwell if told == "Health" else {})}}


def _errors(*also: str) -> Schema:
    told = {"description": "an error", "content": {"application/json": {"schema": _ref("Error")}}}
    return dict.fromkeys(("400", "401", "404", "405", "413", "429", "503", *also), told)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": least, **({} if most is None else {"maxItems": most})}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int = _MOST_INTEGER) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _shared() -> dict[str, Schema]:
    function = _object(("name",), name=_NAME, description=_TEXT, parameters=_ANY, strict=_FLAG)
    named = _object(("type", "function"), type=_one_of("function"), function=_object(("name",), name=_NAME))
    allowed = _object(("mode", "tools"), mode=_one_of("auto", "required"), tools=_list(named, least=1))
    schema = _object(("name",), name=_NAME, description=_TEXT, schema=_ANY, strict=_FLAG)
    call = _object(("name", "arguments"), name=_NAME, arguments=_TEXT)
    return {
        "TextPart": _object(("type", "text"), type=_one_of("text"), text=_TEXT),
        "RefusalPart": _object(("type", "refusal"), type=_one_of("refusal"), refusal=_TEXT),
        "Content": {"anyOf": [_TEXT, _list(_ref("TextPart"))]},
        "Said": {"anyOf": [_TEXT, _list({"anyOf": [_ref("TextPart"), _ref("RefusalPart")]})]},
        "Message": {
            "anyOf": [
                _object(
                    ("role", "content"),
                    role=_one_of("system", "developer", "user"),
                    content=_ref("Content"),
                    name=_NAME,
                ),
                _object(
                    ("role",),
                    role=_one_of("assistant"),
                    content=_or_null(_ref("Said")),
                    refusal=_or_null(_TEXT),
                    reasoning_content=_or_null(_TEXT),
                    reasoning=_or_null(_TEXT),
                    tool_calls=_list(_object(("id", "function"), id=_NAME, type=_one_of("function"), function=call)),
                ),
                _object(
                    ("role", "content", "tool_call_id"),
                    role=_one_of("tool"),
                    content=_ref("Content"),
                    tool_call_id=_NAME,
                ),
            ]
        },
        "Tool": _object(("type", "function"), type=_one_of("function"), function=function),
        "ToolChoice": {
            "anyOf": [
                _one_of("auto", "none", "required"),
                named,
                _object(("type", "allowed_tools"), type=_one_of("allowed_tools"), allowed_tools=allowed),
            ]
        },
        "ResponseFormat": {
            "anyOf": [
                _object(("type",), type=_one_of("text", "json_object")),
                _object(("type", "json_schema"), type=_one_of("json_schema"), json_schema=schema),
            ]
        },
        "StreamOptions": _object(include_usage=_FLAG, include_obfuscation={"const": False}),
    }


def _sampling() -> dict[str, Schema]:
    return {
        "temperature": _or_null(_number(0, 100)),
        "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "stream": _or_null(_FLAG),
        "user": _TEXT,
        "metadata": _or_null({"type": "object", "additionalProperties": _TEXT, "maxProperties": 16}),
        "store": _or_null(_FLAG),
        "service_tier": _or_null(_TEXT),
        "safety_identifier": _TEXT,
        "prompt_cache_key": _TEXT,
    }


def _chosen() -> dict[str, Schema]:
    most = _or_null(_integer(1))
    mark = {"type": "string", "minLength": 1}
    return _sampling() | {
        "max_tokens": most,
        "max_completion_tokens": most,
        "n": _or_null(_integer(1, MOST_CHOICES)),
        "seed": _or_null(_integer(-(2**63))),
        "stop": {"anyOf": [mark, _list(mark, most=STOP_LIMIT), {"type": "null"}]},
        "presence_penalty": _or_null(_number(-2, 2)),
        "frequency_penalty": _or_null(_number(-2, 2)),
        "logit_bias": _or_null(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,5}$"},
                "additionalProperties": _number(-100, 100),
                "maxProperties": 1024,
            }
        ),
        "stream_options": _or_null(_ref("StreamOptions")),
        "kv_hints": _or_null(_ref("Envelope")),
    }


def _asked(model: str) -> dict[str, Schema]:
    served: Schema = {"const": model}
    chat = _object(
        ("model", "messages"),
        model=served,
        messages=_list(_ref("Message"), least=1),
        tools=_list(_ref("Tool")),
        tool_choice=_ref("ToolChoice"),
        parallel_tool_calls=_FLAG,
        response_format=_ref("ResponseFormat"),
        logprobs=_or_null(_FLAG),
        top_logprobs=_or_null(_integer(0, MOST_TOP_LOGPROBS)),
        continue_final_message=_FLAG,
        add_generation_prompt=_FLAG,
        reasoning_effort=_or_null(_one_of(*EFFORTS)),
        chat_template_kwargs=_or_null({"type": "object"}),
        **_chosen(),
    )
    completion = _object(
        ("model", "prompt"),
        model=served,
        prompt={"anyOf": [_TEXT, _list(_TEXT, least=1, most=1)]},
        echo=_FLAG,
        logprobs=_or_null(_integer(0, MOST_COMPLETION_LOGPROBS)),
        best_of=_or_null({"const": 1}),
        suffix=_or_null({"const": ""}),
        **_chosen(),
    )
    return {
        "ChatRequest": chat,
        "CompletionRequest": completion,
        "ResponseRequest": _response_request(served),
        "Hint": _hint(),
        "Envelope": _envelope(),
        "Hints": {"anyOf": [_ref("Hint"), _object(("hints",), hints=_list(_ref("Hint")))]},
        "Event": {
            "anyOf": [
                _object(
                    ("event", "lifecycle_id"),
                    event=_one_of("stall_started"),
                    lifecycle_id=_NAME,
                    kind=_NAME,
                    estimated_duration_s=_or_null(_number(0, 1e6)),
                ),
                _object(("event", "lifecycle_id"), event=_one_of("stall_finished"), lifecycle_id=_NAME),
            ]
        },
    }


def _response_request(served: Schema) -> Schema:
    part = _object(("type", "text"), type=_one_of("input_text", "output_text"), text=_TEXT)
    content = {"anyOf": [_TEXT, _list(part)]}
    thought = _object(("type", "text"), type=_one_of("reasoning_text"), text=_TEXT)
    item = {
        "anyOf": [
            _object(
                ("role", "content"),
                type=_one_of("message"),
                role=_one_of("user", "system", "developer"),
                content=content,
            ),
            _object(
                ("role", "content"),
                type=_one_of("message"),
                role=_one_of("assistant"),
                content={"anyOf": [_TEXT, _list({"anyOf": [part, _ref("RefusalPart")]})]},
            ),
            _object(
                ("type", "call_id", "name", "arguments"),
                type=_one_of("function_call"),
                call_id=_NAME,
                name=_NAME,
                arguments=_TEXT,
            ),
            _object(("type", "call_id", "output"), type=_one_of("function_call_output"), call_id=_NAME, output=content),
            _object(("type",), type=_one_of("reasoning"), summary=_list(_ANY), content=_or_null(_list(thought))),
        ]
    }
    tool = _object(
        ("type", "name"),
        type=_one_of("function"),
        name=_NAME,
        description=_or_null(_TEXT),
        parameters=_or_null(_ANY),
        strict=_or_null(_FLAG),
    )
    named = _object(("type", "name"), type=_one_of("function"), name=_NAME)
    schema = _object(("type", "name"), type=_one_of("json_schema"), name=_NAME, schema=_ANY, strict=_FLAG)
    shape = {"anyOf": [_object(("type",), type=_one_of("text", "json_object")), schema]}
    return _object(
        ("model", "input"),
        model=served,
        input={"anyOf": [_TEXT, _list(item, least=1)]},
        instructions=_or_null(_TEXT),
        tools=_list(tool),
        tool_choice={"anyOf": [_one_of("auto", "none", "required"), named]},
        parallel_tool_calls=_or_null(_FLAG),
        max_output_tokens=_or_null(_integer(1)),
        previous_response_id=_or_null(_TEXT),
        text=_object(format=shape),
        reasoning=_or_null(_object(effort=_or_null(_one_of(*EFFORTS)))),
        include=_or_null(_list(_one_of("message.output_text.logprobs"))),
        top_logprobs=_or_null(_integer(0, MOST_TOP_LOGPROBS)),
        truncation=_or_null(_one_of("disabled")),
        stream_options=_or_null(_object(include_obfuscation={"const": False})),
        kv_hints=_or_null(_ref("Envelope")),
        **_sampling(),
    )


def _hint() -> Schema:
    count = _integer(0, 2**53)
    name = {"type": "string", "maxLength": 128}
    wait = {"type": "object", "properties": {"p10_ms": count, "p50_ms": count, "p90_ms": count, "n": count}}
    call = {"type": "object", "required": ["id", "tool"], "properties": {"id": name, "tool": name}}
    kinds = ("turn_start", "turn_end", "tool_start", "tool_update", "tool_end", "tool_error", "session_end")
    return {
        "type": "object",
        "required": ["v", "id", "kind", "ts_ms", "session"],
        "properties": {
            "v": {"const": VERSION},
            "id": name,
            "kind": _one_of(*kinds),
            "ts_ms": count,
            "session": name,
            "parent": name,
            "final": _FLAG,
            "call": call,
            "wait": wait,
        },
    }


def _envelope() -> Schema:
    action = {
        "type": "object",
        "required": ["action_type", "action_version", "payload"],
        "properties": {
            "action_id": _TEXT,
            "action_type": {"const": ACTION[0]},
            "action_version": {"const": ACTION[1]},
            "payload": _ref("Hint"),
        },
    }
    return {"type": "object", "required": ["actions"], "properties": {"actions": _list(action, most=MOST_HINTS)}}


def _told() -> dict[str, Schema]:
    def has(*names: str, **properties: Schema) -> Schema:
        return {"type": "object", "required": list(names), "properties": properties}

    count = {"type": "integer", "minimum": 0}
    usage = has(
        "prompt_tokens", "completion_tokens", "total_tokens",
        prompt_tokens=count, completion_tokens=count, total_tokens=count,
    )  # fmt: skip
    response_usage = has(
        "input_tokens", "output_tokens", "total_tokens", input_tokens=count, output_tokens=count, total_tokens=count
    )
    reason = _one_of("stop", "length", "tool_calls")
    chat_choice = has("index", "message", "finish_reason", index=count, message=_ANY, finish_reason=reason)
    text_choice = has("index", "text", "finish_reason", index=count, text=_TEXT, finish_reason=reason)
    card = has("id", "object", "created", "owned_by", id=_TEXT)
    error = has(
        "message", "type", "param", "code", message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)
    )
    return {
        "Chat": has("id", "object", "choices", "usage", choices=_list(chat_choice, least=1), usage=usage),
        "Completion": has("id", "object", "choices", "usage", choices=_list(text_choice, least=1), usage=usage),
        "Response": has("id", "object", "output", "status", "usage", output=_list(_ANY), usage=response_usage),
        "Count": has("count", count=count),
        "Model": card,
        "Models": has("object", "data", data=_list(card, least=1)),
        "Health": has("status", "model", "calls", status=_one_of("ok", "draining"), model=_TEXT, calls=count),
        "Receipts": has("receipts", receipts=_list(has("id", "outcome", outcome=_TEXT))),
        "EventTaken": has("lifecycle_id", "outcome", lifecycle_id=_TEXT),
        "Error": has("error", error=error),
    }
