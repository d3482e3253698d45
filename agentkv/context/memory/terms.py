"""Terms: the words of a text in the form in which memories are looked up, for any script.

Covers words (lower case, no diacritics, English endings cut, parts of camelCase and snake_case) and, where a script
has no spaces, pairs of characters. Terms hold only letters and digits of ASCII, so no text can be mistaken for the
query language of a full-text index. Shingles (runs of terms) tell how much of a text stands in another.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

MAX_TERM_CHARS = 40

_MARKS = "\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff\u0e31-\u0e4e\u0eb1-\u0ece\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(rf"(?:[^\W_]|[{_MARKS}])+")
_DENSE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_RUNS = re.compile(rf"([{_DENSE}]+)|[^{_DENSE}]+")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ACCENTS = re.compile("[\u0300-\u036f]")
_STOP_WORDS = """
a about after all also am an and any are as at be because been before being but by can could did do does doing don down
each few for from further had has have having he her here hers him his how i if in into is it its just know ll me more
most my no nor not now of off on once only or other our out over own re s same she should so some such t tell than that
the their them then there these they this those through to too under until up us ve very was we were what when where
which while who whom whose why will with would you your please
"""
_STOP = frozenset(_STOP_WORDS.split())


def terms(text: str, *, singles: bool = False) -> list[str]:
    """The terms of `text` in their order, common English words left out. `singles` adds single CJK characters."""
    found: list[str] = []
    for word in _WORD.findall(text):
        if word.isascii():
            found += _ascii(word)
        else:
            found += _of_any_script(word, singles=singles)
    return found


def shingles(text: str, width: int = 4) -> Iterator[int]:
    """Hashes of every run of `width` terms of `text`, of all of them where there are fewer."""
    words = terms(text)
    for start in range(max(1, len(words) - width + 1) if words else 0):
        yield hash(tuple(words[start : start + width]))


@lru_cache(maxsize=65_536)
def _ascii(word: str) -> tuple[str, ...]:
    low = word.lower()
    whole = (_stem(low[:MAX_TERM_CHARS]),) if low not in _STOP else ()
    parts = _PARTS.findall(word[: 4 * MAX_TERM_CHARS]) if not word.islower() and not word.isdigit() else ()
    if len(parts) < 2:  # noqa: PLR2004  one part is the word
        return whole
    return (*whole, *(_stem(part.lower()[:MAX_TERM_CHARS]) for part in parts if part.lower() not in _STOP))


def _of_any_script(word: str, *, singles: bool) -> Iterator[str]:
    for match in _RUNS.finditer(unicodedata.normalize("NFKC", word[:4000])):
        run = match[0]
        if match[1] is None:
            plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", run.casefold()))[:MAX_TERM_CHARS]
            yield from _ascii(plain) if plain.isascii() else (_encoded(plain),)
            continue
        if singles or len(run) == 1:
            yield from (_encoded(character) for character in run)
        yield from (_encoded(run[at : at + 2]) for at in range(len(run) - 1))


def _encoded(term: str) -> str:
    """`term` in ASCII: the numbers of its characters."""
    return "u" + "u".join(f"{ord(character):x}" for character in term)


def _stem(word: str) -> str:
    """`word` without English endings: plural, -ing, -ed and a last e. Rough, but the same for text and query."""
    if len(word) <= 3 or not word.isalpha():  # noqa: PLR2004  "bus", "is", "4th"
        return word
    if word.endswith("ies"):
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) >= 3 and any(vowel in stem for vowel in "aeiouy"):  # noqa: PLR2004
            word = stem[:-1] if stem[-1] == stem[-2] and stem[-1] not in "sl" else stem
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word  # noqa: PLR2004
