"""Text to token ids and back, safe from many threads, without control tokens that a user's text spells.

Covers: encoding with borders (where a tail may be tokenised alone), decoding, guarding. Does not cover: chat templates
(`chat.py`), whose turn it is to be tokenised (`transcript.py`), streaming (`detokenise.py`).

Guarding: in text from users and tools that spells a control token, such as "<|im_end|>", MARK (a Unicode noncharacter)
stands inside the spelling when the template runs. So nobody forges a turn by writing its marker, wherever the template cuts
the text, and no mark can hide a control token of the template's own. Afterwards marks vanish: what had one is tokenised as plain
text. Templates that print lists and objects in Python's or JSON's spelling escape marks, which is taken back (`unescaped`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.errors import RequestInvalid, UnsupportedModel

MARK = "\ufdd0"
_ESCAPED = r"\\+ufdd0"
"""What `repr` and `json.dumps` make of it, once or one inside the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids of a text. `borders`: (characters, tokens) after each control token: a safe place to cut."""

    ids: list[int]
    borders: list[tuple[int, int]]


class Tokeniser:
    """A private copy of a model's tokenizer, never changed, hence free of its borrow errors between threads."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModel("the model's tokenizer is not a fast one (there is no tokenizer.json)")
        self._tokenizer = type(backend).from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._literal: Any = None
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = {id_: token.content for id_, token in added.items() if token.special}
        found = sorted(self._controls.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, found))) if found else None
        marked = [re.escape(text[0]) + MARK + re.escape(text[1:]) for text in found]
        self._marks = re.compile(f"({'|'.join([*marked, MARK])})")
        escaped = [f"(?<={re.escape(text[0])}){_ESCAPED}(?={re.escape(text[1:])})" for text in found if len(text) > 1]
        self._escaped = re.compile("|".join(escaped)) if escaped else None
        self._begun = frozenset(text[:end] for text in found for end in range(1, len(text)))
        self._longest = max(map(len, found), default=0)
        self.byte_ids = self._found_bytes()
        """(id -> byte) of tokens that stand for a byte each, where the tokenizer falls back to them."""
        self.plain = self._ids("one two") + self._ids(" three") == self._ids("one two three")
        """True if a tail that starts with a space tokenises alone as it does in its place (byte-level tokenizers)."""

    def encode(self, text: str, *, param: str = "messages", whole: bool = False) -> Encoded:
        """Ids of `text`; control tokens outside of marks become control ids.

        `whole`: a raw prompt, which gets what the tokenizer puts around a text (a start token, if it has one).
        Raises RequestInvalid for text that is no valid Unicode.
        """
        check_unicode(text, param)
        ids: list[int] = []
        borders: list[tuple[int, int]] = []
        at = 0
        parts = self._marks.split(text) if MARK in text else [text]
        for number, part in enumerate(parts):
            if number % 2:
                ids += self._literally(part.replace(MARK, "")) if len(part) > 1 else []
            elif part:
                encoding = self._tokenizer.encode(part, add_special_tokens=whole and at == 0)
                offsets = encoding.offsets
                for place, id_ in enumerate(encoding.ids):
                    if id_ in self._controls and offsets[place][1]:
                        borders.append((at + offsets[place][1], len(ids) + place + 1))
                ids += encoding.ids
            at += len(part)
        return Encoded(ids=ids, borders=borders)

    def count(self, text: str) -> int:
        """Tokens of `text` as it stands, control tokens spelled out. Raises RequestInvalid as `encode` does."""
        return len(self.encode(text).ids)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as a raw prompt. Raises RequestInvalid as `encode` does."""
        return tuple(self.encode(text, param="prompt", whole=True).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without control tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def without_spellings(self) -> str:
        """The tokenizer as its own JSON, but no text spells a control token: their names begin with MARK."""
        data = json.loads(self._tokenizer.to_str())
        model, named = data["model"], set(self._controls.values())

        def renamed(word: str) -> str:
            return MARK + word if word in named else word

        for token in data["added_tokens"]:
            if token["special"]:
                token["content"] = renamed(token["content"])
        words = model.get("vocab")
        if isinstance(words, dict):
            model["vocab"] = {renamed(word): id_ for word, id_ in words.items()}
        elif isinstance(words, list):
            model["vocab"] = [[renamed(word), *rest] for word, *rest in words]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = renamed(model["unk_token"])
        data["post_processor"] = None
        return json.dumps(data)

    def control_ids(self) -> list[int]:
        """All control tokens."""
        return sorted(self._controls)

    def control(self, token_id: int) -> str | None:
        """What a control token is written as; None for an ordinary token."""
        return self._controls.get(token_id)

    def starts_with_control(self, text: str) -> bool:
        """True if the first token of `text` is a control token."""
        return self._spelled is not None and self._spelled.match(text) is not None

    def guard(self, text: str) -> str:
        """`text` with every spelled control token marked as plain text."""
        return self.spelled_apart(text.replace(MARK, "\ufffd"), MARK)

    def guard_removed(self, text: str, words: Sequence[str]) -> str:
        """Guarded `text`, from which a template removes `words`: what then joins spells no control token either."""
        for word in words:
            if word in text and self.spells_control(text.replace(word, "")):
                text = text.replace(word, MARK + word)
        return text

    def unescaped(self, text: str) -> str:
        """A rendered `text`, in which a template may have printed guarded ones in Python's or JSON's spelling."""
        return text if self._escaped is None or "ufdd0" not in text else self._escaped.sub(MARK, text)

    def spelled_apart(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of every spelled control token: it spells none any more."""
        return (
            text if self._spelled is None else self._spelled.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        )

    def without_controls(self, text: str) -> str:
        """`text` without what spells control tokens."""
        return text if self._spelled is None else self._spelled.sub("", text)

    def spells_control(self, text: str) -> bool:
        """True if `text` spells a control token somewhere."""
        return self._spelled is not None and self._spelled.search(text) is not None

    def begun_control(self, text: str) -> int:
        """So many last characters of `text` may be the beginning of a spelled control token."""
        lengths = range(min(len(text), self._longest - 1), 0, -1)
        return next((length for length in lengths if text[-length:] in self._begun), 0)

    def _found_bytes(self) -> dict[int, int]:
        named = {self._tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        found = {id_: byte for id_, byte in named.items() if id_ is not None and id_ not in self._controls}
        ids = {byte: id_ for id_, byte in found.items()}
        broken = [ids.get(byte) for byte in "\ufffd".encode()]
        known = [id_ for id_ in broken if id_ is not None]
        return found if len(known) == len(broken) and self.decode(known) == "\ufffd" else {}

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _literally(self, text: str) -> list[int]:
        if self._literal is None:
            literal = type(self._tokenizer).from_str(self._tokenizer.to_str())
            literal.encode_special_tokens = True
            self._literal = literal
        ids: list[int] = self._literal.encode(text, add_special_tokens=False).ids
        return ids


def check_unicode(text: str, param: str) -> None:
    """Raise RequestInvalid for half surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start} is {text[error.start]!r}"
        raise RequestInvalid(
            f"the text is not valid Unicode: {where}, half of a surrogate pair", param=param
        ) from error
