"""The one who slims: a text in, a text within a bound out, the same bytes for the same text in every process.

Covers the order of things (clean, leave small ones alone, first rule that answers, exact bound, marker), the small
model that may come after the rules, and the memory of what came out. What rules do is in rules.py and its neighbours;
where whole outputs are kept is outputs.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agentkv.context.slim import jsons
from agentkv.context.slim.clean import clean, lines_of, storable
from agentkv.context.slim.jsontext import looks_like_json, minified
from agentkv.context.slim.marker import ANSWER_CHARS, NOTE_CHARS, READER, is_marked, with_marker, with_marker_inside
from agentkv.context.slim.pick import is_gap
from agentkv.context.slim.rule import Rule, SlimRules
from agentkv.context.slim.rules import default_rules
from agentkv.context.slim.verbatim import newlines, unpadded, verbatim
from agentkv.errors import ConfigError
from agentkv.log import count as count_event
from agentkv.log import failed

MAX_TOKENS = 1_500
"""What one output may cost in a prompt, if nobody says otherwise."""
SMALL_TOKENS = 160
"""Outputs of at most so many tokens only lose what loses nothing."""
MIN_TOKENS = 64
_MARKER_TOKENS = 40
_WORTH = 0.85
"""An output that fits stays as it is unless slimming brings it below this share of its tokens."""
_TRIES = 4
_MEMO = 512
_EXACT_CHARS, _SAMPLE_CHARS = 64_000, 8_000
_LINES_CHARS = 1_000_000
_LEAST_CHARS = 8
_LAST_RESORT = "[agentkv: cut]"
_COUNTED_CHARS = 24
"""Texts of more characters per allowed token are over any limit without being counted."""


class Store(Protocol):
    """What the Slimmer needs of a store of outputs."""

    def handle(self, text: str) -> str:
        """The handle under which `text` is or would be kept."""
        ...

    def put(self, text: str) -> str:
        """Keep `text`, answer its handle. Never raises."""
        ...

    def recall(self, key: str) -> str | None:
        """What was remembered under `key`."""
        ...

    def remember(self, key: str, text: str) -> None:
        """Keep a short text under `key`. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slimmed:
    """What became of an output. `handle` reads it whole where something was left out; `rule` names who did it.

    `raw_tokens` is exact for texts of moderate length and extrapolated from samples for very long ones.
    """

    text: str
    raw_tokens: int
    kept_tokens: int
    handle: str | None
    rule: str


class Slimmer:
    """Makes tool outputs small. Thread-safe.

    `count` counts tokens. An output costs at most `max_tokens`, its marker included; `tool_tokens` sets that for
    single tools. `untouched` names tools whose outputs only become storable. `compress(text, max_tokens) -> str` may
    be a small model: it is asked once per output that a rule shortened, and its answer (or its failure) is remembered
    in `outputs`, so that the same output gives the same bytes ever after.

    Raises ConfigError for a bound below MIN_TOKENS.
    """

    def __init__(
        self,
        *,
        outputs: Store | None,
        count: Callable[[str], int],
        max_tokens: int = MAX_TOKENS,
        small_tokens: int = SMALL_TOKENS,
        tool_tokens: Mapping[str, int] | None = None,
        untouched: Collection[str] = (),
        rules: Iterable[Rule] | None = None,
        compress: Callable[[str, int], str] | None = None,
    ) -> None:
        for name, tokens in {"max_tokens": max_tokens, **(tool_tokens or {})}.items():
            if tokens < MIN_TOKENS:
                raise ConfigError(f"{name}={tokens}: a slimmed output needs at least {MIN_TOKENS} tokens")
        if small_tokens < 0:
            raise ConfigError(f"small_tokens={small_tokens} is negative")
        self._outputs = outputs
        self._count = count
        self._max_tokens = max_tokens
        self._small_tokens = small_tokens
        self._tool_tokens = dict(tool_tokens or {})
        self._untouched = frozenset(untouched)
        self._rules = SlimRules(*(default_rules() if rules is None else rules))
        self._compress = compress
        self._memo: OrderedDict[bytes, Slimmed] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def outputs(self) -> Store | None:
        """Where whole outputs are kept."""
        return self._outputs

    @property
    def rules(self) -> SlimRules:
        """The rules in the order in which they are asked."""
        return self._rules

    def slim(self, text: str, *, tool: str = "", command: str = "") -> Slimmed:
        """What `text` becomes within this tool's bound. Never raises; what was slimmed stays as it is.

        JSON stays JSON. A text that is small, or already slimmed and within the bound, keeps its bytes. Where something
        was left out, the last line (in JSON: the last field or item) says so and how to read the whole.
        """
        key = _digest(tool, command, text)
        with self._lock:
            known = self._memo.get(key)
            if known is not None:
                self._memo.move_to_end(key)
                return known
        slimmed = self._slimmed(text, tool, command)
        with self._lock:
            self._memo[key] = slimmed
            while len(self._memo) > _MEMO:
                self._memo.popitem(last=False)
        return slimmed

    def _slimmed(self, text: str, tool: str, command: str) -> Slimmed:
        limit = self._tool_tokens.get(tool, self._max_tokens)
        if tool in self._untouched or (tool == READER and len(text) <= ANSWER_CHARS + NOTE_CHARS):
            return self._as_is(storable(text), "untouched")
        raw, text = text, newlines(text, tool, command)
        whole = clean(text)
        if is_marked(whole) and self._measured(whole, limit)[1]:
            return self._as_is(whole, "marked")
        whole = tidied(whole, tool, command)
        tokens, fits = self._measured(whole, limit)
        if fits and tokens <= self._small_tokens:
            return self._as_is(whole, "small" if whole == text else "clean", raw=text)
        output = _Output(raw=raw, whole=whole, tokens=tokens, fits=fits, limit=limit, handle=self._handle(raw))
        return self._by_rules(output, tool, command)

    def _by_rules(self, output: _Output, tool: str, command: str) -> Slimmed:
        for rule in self._rules:
            try:
                if not rule.matches(tool, command, output.whole):
                    continue
                if rule.over_only and output.fits:
                    if rule.apply(output.whole, output.limit) is None:
                        continue
                    break
                short = self._fitted(rule, output)
            except Exception as error:
                failed("slim_rule_failed", rule=rule.name, error=type(error).__name__)
                continue
            if short is not None:
                return self._finished(output, short, rule, tool, command)
        if output.fits:
            return self._as_is(output.whole, "clean" if output.whole != output.raw else "none", raw=output.raw)
        return self._finished(output, _LAST_RESORT, None, tool, command)

    def _fitted(self, rule: Rule, output: _Output) -> str | None:
        """What `rule` makes of the output, with its marker, within the limit; None if it is no use here."""
        budget = output.limit - _MARKER_TOKENS
        body: str | None = ""
        for _ in range(_TRIES):
            body = rule.apply(output.whole, budget)
            if body is None:
                return None
            short = self._marked(body, rule, output)
            kept, fits = self._measured(short, output.limit)
            if fits:
                return short if not output.fits or kept <= output.tokens * _WORTH else None
            budget = min(budget - 1, int(budget * 0.9 * output.limit / kept))
            if budget < 1:
                break
        return None if output.fits else self._hard_cut(rule, output, body or "")

    def _hard_cut(self, rule: Rule, output: _Output, body: str) -> str:
        """Ends of `body` by characters: for rules that do not keep to their budget. Halves until it fits."""
        if not jsons.is_json(output.whole):
            size = len(body) // 2
            while size > _LEAST_CHARS:
                short = self._marked(f"{body[: size * 2 // 3]} .. {body[len(body) - size // 3 :]}", rule, output)
                if self._measured(short, output.limit)[1]:
                    return short
                size //= 2
        short = self._marked(jsons.empty(output.whole), rule, output)
        return short if self._measured(short, output.limit)[1] else _LAST_RESORT

    def _marked(self, body: str, rule: Rule, output: _Output) -> str:
        body = clean(body)
        if looks_like_json(body) and jsons.is_json(body) and jsons.is_json(output.whole):
            note = f"{max(0, len(output.whole) - len(body))} of {len(output.whole)} characters left out"
            fields = jsons.left_out(output.whole, body)
            note += f", with them all of {', '.join(fields)}" if fields else ""
            return with_marker_inside(body, note, output.handle)
        if rule.lossless:
            return with_marker(body, rule.name, None)
        total = len(lines_of(output.whole)) if len(output.whole) < _LINES_CHARS else output.whole.count("\n") + 1
        out = total - sum(not is_gap(line) for line in body.split("\n"))
        note = f"{out} of {total} lines left out"
        if out <= 0:
            note = f"{max(0, len(output.whole) - len(body))} of {len(output.whole)} characters left out"
        return with_marker(body, note, output.handle)

    def _finished(self, output: _Output, short: str, rule: Rule | None, tool: str, command: str) -> Slimmed:
        lossless = rule is not None and rule.lossless
        if self._outputs is not None and not lossless:
            self._outputs.put(output.raw)
        name = rule.name if rule is not None else "last resort"
        if self._compress is not None and not lossless and not jsons.is_json(output.whole):
            smaller = self._compressed(output, short, _digest(tool, command, output.raw).hex())
            short, name = (smaller, f"{name}+compress") if smaller else (short, name)
        return Slimmed(
            text=short,
            raw_tokens=self._sampled(output.raw),
            kept_tokens=self._count(short),
            handle=None if lossless else output.handle,
            rule=name,
        )

    def _compressed(self, output: _Output, short: str, key: str) -> str | None:
        """The small model's answer with its marker, or None; either is remembered, so that it never changes later."""
        assert self._compress is not None
        key = f"{key}-{output.limit}"
        body, _, mark = short.rpartition("\n")
        answer = self._outputs.recall(key) if self._outputs is not None else None
        if answer is None:
            answer = ""
            try:
                said = self._compress(body, output.limit - _MARKER_TOKENS)
                if isinstance(said, str):
                    answer = clean(said).strip()
            except Exception as error:
                failed("slim_compress_failed", error=type(error).__name__)
            if answer and not (
                self._measured(f"{answer}\n{mark}", output.limit)[1] and self._count(answer) < self._count(body)
            ):
                count_event("slim_compress_useless")
                answer = ""
            if self._outputs is not None:
                self._outputs.remember(key, answer)
        return f"{answer}\n{mark}" if answer else None

    def _as_is(self, text: str, rule: str, *, raw: str | None = None) -> Slimmed:
        tokens = self._sampled(text)
        raw_tokens = tokens if raw is None or raw == text else self._sampled(raw)
        return Slimmed(text=text, raw_tokens=raw_tokens, kept_tokens=tokens, handle=None, rule=rule)

    def _handle(self, text: str) -> str | None:
        return self._outputs.handle(text) if self._outputs is not None else None

    def _measured(self, text: str, limit: int) -> tuple[int, bool]:
        """Tokens of `text`, and whether it is within `limit`; texts far over it are not counted out."""
        if len(text) > limit * _COUNTED_CHARS:
            return self._sampled(text), False
        tokens = self._count(text)
        return tokens, tokens <= limit

    def _sampled(self, text: str) -> int:
        if len(text) <= _EXACT_CHARS:
            return self._count(text)
        starts = (0, (len(text) - _SAMPLE_CHARS) // 2, len(text) - _SAMPLE_CHARS)
        counted = sum(self._count(text[start : start + _SAMPLE_CHARS]) for start in starts)
        return max(1, round(counted * len(text) / (_SAMPLE_CHARS * len(starts))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One output on its way: as it came, tidied, its tokens, whether it is within its limit."""

    raw: str
    whole: str
    tokens: int
    fits: bool
    limit: int
    handle: str | None


def tidied(whole: str, tool: str, command: str) -> str:
    """A clean text after what else loses nothing: JSON without blanks unless a file's own text was asked for, line
    numbers of a file without padding.
    """
    if verbatim(tool, command):
        return unpadded(whole)
    return (minified(whole) or whole) if looks_like_json(whole) else whole


def _digest(*parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
