"""How tokens are chosen, what may be chosen at all, and what is told about a choice.

Covers: Sampling, Grammar, Logprob. Does not cover: who does it (`local/sampler.py`, `local/guide.py`), nor where these
stand (`base.py`'s Request, Chunk and Generation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentkv.errors import RequestInvalid

MOST_LOGPROBS = 20
_MOST_BIASED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens. temperature 0 is greedy. `max_tokens` None means up to the context's end.

    In this order: `logit_bias` is added to the scores of its tokens (ids); `frequency_penalty` (for each time) and
    `presence_penalty` (once) are taken from those of tokens that the answer holds; the score of a token in prompt or
    answer is divided by `repetition_penalty` if positive, multiplied if negative; after the temperature the `top_k`
    best stay, of these the smallest set that reaches `top_p`, of these whose chance is at least `min_p` times the best
    one's. `logprobs` asks for the log probability of each token, and of so many of the likeliest in its place.
    `ignore_eos`: the answer goes on until max_tokens or a stop text.

    Raises RequestInvalid for a value that no engine could work with, so that none ever sees one.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens, low=1), "max_tokens", self.max_tokens, "an integer from 1 on")
        _require(_is_real(self.temperature, 0, 100), "temperature", self.temperature, "a number from 0 on")
        _require(_is_real(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        stops = self.stop if isinstance(self.stop, tuple) else (None,)
        _require(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "a tuple of texts that are not empty")
        _require(_is_int(self.seed, low=-(2**63)), "seed", self.seed, "an integer of 64 bits")
        _require(_is_int(self.top_k, low=1), "top_k", self.top_k, "an integer from 1 on")
        _require(_is_real(self.min_p, 0, 1), "min_p", self.min_p, "a number in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(_is_real(getattr(self, name), -2, 2), name, getattr(self, name), "a number from -2 to 2")
        repetition = self.repetition_penalty
        allowed = _is_real(repetition, 0, 100) and repetition > 0
        _require(allowed, "repetition_penalty", repetition, "a number above 0, 1 for none")
        _require(_is_bias(self.logit_bias), "logit_bias", self.logit_bias, "token ids with numbers from -100 to 100")
        logprobs = self.logprobs
        few = _is_int(logprobs, low=0) and (logprobs or 0) <= MOST_LOGPROBS
        _require(few, "logprobs", logprobs, f"an integer from 0 to {MOST_LOGPROBS}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")

    @property
    def plain(self) -> bool:
        """True if nothing but the temperature and top_p decides."""
        return (
            self.top_k is None
            and not (self.min_p or self.presence_penalty or self.frequency_penalty or self.logit_bias)
            and self.repetition_penalty == 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the answer's text must be: any JSON object, JSON that a schema describes (`text` is the schema's JSON), a
    text that a regular expression or a Lark grammar matches. An engine that cannot hold an answer to it refuses.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token, its bytes (of half a character: what it has of it), and the natural logarithm of its chance by the
    model's own scores, before any of the Sampling. `top`: the likeliest tokens in its place, best first; theirs is ().
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[Logprob, ...] = ()


def _require(allowed: bool, param: str, value: object, what: str) -> None:
    if not allowed:
        raise RequestInvalid(f"{param}={value!r:.100} is not allowed; give {what}", param=param, code="invalid_value")


def _is_int(value: object, *, low: int) -> bool:
    """None, or an integer that also fits into 64 bits."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63)


def _is_real(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_bias(bias: object) -> bool:
    return (
        isinstance(bias, Mapping)
        and len(bias) <= _MOST_BIASED
        and all(_is_int(token, low=0) and token is not None and _is_real(by, -100, 100) for token, by in bias.items())
    )
