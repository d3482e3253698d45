"""What earlier responses said, so that `previous_response_id` can go on from them. In memory, and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict

from agentkv.core.message import Message
from agentkv.server.fields import refuse

MOST_STORED = 1024
MOST_CHARS = 64_000_000


class Stored:
    """The messages of the newest responses, each with whoever it was for. Thread-safe.

    What is beyond `most` responses or `most_chars` characters of text is forgotten, longest unused first. A tenant finds
    only its own.
    """

    def __init__(self, *, most: int = MOST_STORED, most_chars: int = MOST_CHARS) -> None:
        self._most = most
        self._most_chars = most_chars
        self._chars = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[tuple[Message, ...], int]] = OrderedDict()

    def put(self, tenant: str, response_id: str, messages: tuple[Message, ...]) -> None:
        """Keep a response's messages, its answer the last of them."""
        chars = sum(map(_chars, messages))
        with self._lock:
            self._kept[tenant, response_id] = (messages, chars)
            self._chars += chars
            while self._kept and (len(self._kept) > self._most or self._chars > self._most_chars):
                _, (_, gone) = self._kept.popitem(last=False)
                self._chars -= gone

    def get(self, tenant: str, response_id: str) -> tuple[Message, ...]:
        """The messages. Raises RequestInvalid where the response is not known, or not any more."""
        with self._lock:
            found = self._kept.get((tenant, response_id))
            if found is not None:
                self._kept.move_to_end((tenant, response_id))
        if found is None:
            refuse(
                "previous_response_id",
                f"{response_id!r:.80} is not known here: it was not stored, or it is too old; send the whole input",
                code="previous_response_not_found",
            )
        return found[0]

    def __len__(self) -> int:
        return len(self._kept)


def _chars(message: Message) -> int:
    return (
        len(message.content)
        + len(message.reasoning)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    )
