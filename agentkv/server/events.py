"""ResponseReply: an answer in the form of OpenAI's responses, whole and as a stream of typed events.

Output items are the reasoning, where the model thought, a message, where there is text, and one function_call for each
call. The stream tells each item's beginning, its pieces and its end, and last the whole response; its items stand in the
order in which they began.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentkv.core.message import Message, ToolCall
from agentkv.core.usage import Usage
from agentkv.engine.base import CallDelta, Chunk, Generation, TokenLogprob
from agentkv.server.refusals import refusal
from agentkv.server.replies import new_id, token_logprobs

_INCOMPLETE = {"length": "max_output_tokens"}
_TOO_MANY, _BAD = 429, 400


@dataclass(slots=True, kw_only=True)
class ResponseReply:
    """One response. `told` repeats what was asked; `keep` is called with the answer before the end is told."""

    model: str
    created_s: int
    told: dict[str, Any]
    store: bool
    keep: Callable[[str, Message], None]
    id: str = field(default_factory=lambda: new_id("resp_"))
    _number: int = 0
    _message_id: str = field(default_factory=lambda: new_id("msg_"))
    _items: list[dict[str, Any]] = field(default_factory=list)
    """The output of a stream so far, each item where it was told to begin; `_thought_at` and the others point into it."""
    _thought: str = ""
    _thought_at: int | None = None
    """The thought that is being told; another one behind text or calls is another item."""
    _text: str = ""
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _text_at: int | None = None
    _calls_at: list[int] = field(default_factory=list)

    # -- whole

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The response object of an answer that has ended."""
        self._kept(generation)
        output: list[dict[str, Any]] = []
        status = "incomplete" if generation.finish_reason in _INCOMPLETE else "completed"
        if generation.reasoning:
            over = generation.text or generation.tool_calls or generation.unfinished
            output.append(_reasoning(new_id("rs_"), generation.reasoning, "completed" if over else status))
        if generation.text or not (output or generation.tool_calls or generation.unfinished):
            output.append(self._message(generation.text, generation.logprobs, status))
        output += [_call_item(call, new_id("fc_"), "completed") for call in generation.tool_calls]
        output += [_call_item(call, new_id("fc_"), "incomplete") for call in generation.unfinished]
        return self._response(status, output, generation)

    def _kept(self, generation: Generation) -> None:
        if self.store:
            said = Message(
                role="assistant",
                content=generation.text,
                tool_calls=generation.tool_calls,
                reasoning=generation.reasoning,
            )
            self.keep(self.id, said)

    def _response(
        self, status: str, output: list[dict[str, Any]], generation: Generation | None = None
    ) -> dict[str, Any]:
        reason = None if generation is None else _INCOMPLETE.get(generation.finish_reason)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self.model,
            "output": output,
            "store": self.store,
            "usage": None if generation is None else response_usage(generation.usage),
            "background": False,
            "service_tier": "default",
            "user": None,
            **self.told,
        }

    def _message(self, text: str, logprobs: tuple[TokenLogprob, ...], status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": status,
            "content": [_text_part(text, logprobs)],
        }

    # -- stream

    def begin(self) -> bytes:
        """That the response exists, and that it is under way."""
        empty = self._response("in_progress", [])
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def piece(self, chunk: Chunk) -> bytes:
        """Text and arguments as they come."""
        told = self._thought_piece(chunk.reasoning) if chunk.reasoning else b""
        if chunk.text or chunk.logprobs or chunk.calls:
            told += self._thought_done("completed")
        if chunk.text or chunk.logprobs:
            told += self._open_text()
            self._text += chunk.text
            self._logprobs += chunk.logprobs
            told += self._event(
                "response.output_text.delta",
                **self._place(),
                delta=chunk.text,
                logprobs=[_slim(entry) for entry in token_logprobs(chunk.logprobs)],
            )
        return told + b"".join(self._call_piece(delta) for delta in chunk.calls)

    def _added(self, item: dict[str, Any]) -> tuple[int, bytes]:
        """A new item of the output: where it stands, and its event."""
        self._items.append(item)
        at = len(self._items) - 1
        return at, self._event("response.output_item.added", output_index=at, item=item)

    def _open_text(self) -> bytes:
        if self._text_at is not None:
            return b""
        self._text_at, told = self._added({**self._message("", (), "in_progress"), "content": []})
        return told + self._event("response.content_part.added", **self._place(), part=_text_part("", ()))

    def _thought_piece(self, text: str) -> bytes:
        told = b""
        if self._thought_at is None:
            self._thought = ""
            self._thought_at, told = self._added(_reasoning(new_id("rs_"), "", "in_progress"))
            part = {"type": "reasoning_text", "text": ""}
            told += self._event("response.content_part.added", **self._thinking(), part=part)
        self._thought += text
        return told + self._event("response.reasoning_text.delta", **self._thinking(), delta=text)

    def _thinking(self) -> dict[str, Any]:
        assert self._thought_at is not None
        return {"item_id": self._items[self._thought_at]["id"], "output_index": self._thought_at, "content_index": 0}

    def _thought_done(self, status: str) -> bytes:
        if self._thought_at is None:
            return b""
        at, item = self._thought_at, _reasoning(self._items[self._thought_at]["id"], self._thought, status)
        told = self._event("response.reasoning_text.done", **self._thinking(), text=self._thought)
        told += self._event("response.content_part.done", **self._thinking(), part=item["content"][0])
        self._items[at], self._thought_at = item, None
        return told + self._event("response.output_item.done", output_index=at, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": self._text_at, "content_index": 0}

    def _call_piece(self, delta: CallDelta) -> bytes:
        told = b""
        if delta.index == len(self._calls_at):
            call = ToolCall(id=delta.id, name=delta.name, arguments="")
            at, told = self._added(_call_item(call, new_id("fc_"), "in_progress"))
            self._calls_at.append(at)
        at = self._calls_at[delta.index]
        item = self._items[at]
        item["arguments"] += delta.arguments
        if not delta.arguments:
            return told
        return told + self._event(
            "response.function_call_arguments.delta", item_id=item["id"], output_index=at, delta=delta.arguments
        )

    def end(self, generation: Generation) -> bytes:
        """The ends of all items, and the whole response."""
        told = b""
        for index, call in enumerate(generation.tool_calls):
            if index >= len(self._calls_at):  # it did not come in pieces
                told += self._thought_done("completed")
                told += self._call_piece(CallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments))
        status = "incomplete" if generation.finish_reason in _INCOMPLETE else "completed"
        if not self._items:
            told += self._open_text()
        told += self._thought_done(status if len(self._items) == 1 else "completed")
        if self._text_at is not None:
            self._items[self._text_at] = message = self._message(self._text, tuple(self._logprobs), status)
            told += self._text_done(message)
        for index, at in enumerate(self._calls_at):
            self._items[at]["status"] = "completed" if index < len(generation.tool_calls) else "incomplete"
            told += self._call_done(at, self._items[at])
        self._kept(generation)
        return told + self._event(f"response.{status}", response=self._response(status, self._items, generation))

    def _text_done(self, message: dict[str, Any]) -> bytes:
        (part,) = message["content"]
        slim = [_slim(entry) for entry in part["logprobs"]]
        return (
            self._event("response.output_text.done", **self._place(), text=self._text, logprobs=slim)
            + self._event("response.content_part.done", **self._place(), part=part)
            + self._event("response.output_item.done", output_index=self._text_at, item=message)
        )

    def _call_done(self, at: int, item: dict[str, Any]) -> bytes:
        return self._event(
            "response.function_call_arguments.done",
            item_id=item["id"],
            output_index=at,
            name=item["name"],
            arguments=item["arguments"],
        ) + self._event("response.output_item.done", output_index=at, item=item)

    def failed(self, error: BaseException) -> bytes:
        """The response with its error."""
        status, body, _ = refusal(error)
        code = {_TOO_MANY: "rate_limit_exceeded", _BAD: "invalid_prompt"}.get(status, "server_error")
        response = self._response("failed", []) | {"error": {"code": code, "message": body["error"]["message"]}}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number, **fields}, separators=(",", ":"))
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


def response_usage(usage: Usage) -> dict[str, Any]:
    """Usage in the words of responses."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _text_part(text: str, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(logprobs)}


def _reasoning(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}


def _call_item(call: ToolCall, item_id: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _slim(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as events have it: without bytes."""
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
