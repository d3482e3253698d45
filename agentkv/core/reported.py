"""What servers and frameworks report as usage, read into one Usage: many spellings, one meaning.

Covers OpenAI (Chat and Responses), DeepSeek, Moonshot, Groq, xAI, OpenRouter, Anthropic (as itself, and through
OpenAI-compatible proxies), Bedrock, Gemini, Ollama, vLLM, SGLang, llama.cpp, and LangChain's `usage_metadata` and
`llm_output`. Does not cover audio and images (their tokens count as what they are reported with), fees per search, nor
counting where nothing is reported (`context.tokens`). Nothing here raises: a number that cannot be is bounded, and the
report is marked `estimated`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentkv.core.usage import Usage

_MOST = 10**12
"""More tokens than this in one call are a wrong number."""
_MOST_WORKER = 2**64
_INSIDE = ("usage", "token_usage", "usage_metadata", "usageMetadata")
_IN = ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_token_count", "prompt_eval_count")
_OUT = ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "candidates_token_count", "eval_count")  # fmt: skip
_TOTAL = ("total_tokens", "totalTokens", "totalTokenCount", "total_token_count")
_IN_DETAILS = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_OUT_DETAILS = ("completion_tokens_details", "output_tokens_details", "output_token_details")
_CACHED = ("prompt_cache_hit_tokens", "cached_tokens", "cachedContentTokenCount", "cached_content_token_count")
_CACHED_BESIDE = ("cache_read_input_tokens", "cacheReadInputTokens", "cacheReadInputTokenCount")
_WRITTEN = (
    "cache_write_tokens", "cache_creation_tokens", "cached_creation_tokens", "created_cache_tokens",
    "cache_creation_input_tokens", "cache_creation",
)  # fmt: skip
_WRITTEN_BESIDE = ("cache_creation_input_tokens", "cacheWriteInputTokens", "cacheWriteInputTokenCount")
_SHORT = ("ephemeral_5m_input_tokens", "ttl_30m_tokens")
_LONG = ("ephemeral_1h_input_tokens", "ttl_12h_tokens")
_THOUGHT = ("reasoning_tokens", "reasoning", "thinking_tokens")
_THOUGHT_BESIDE = ("thoughtsTokenCount", "thoughts_token_count")
_TOOL_PROMPT = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")
_TIER_PREFIXES = ("priority", "flex", "batch")
_STANDARD = ("default", "auto", "standard", "standard_only", "on_demand")
_CACHE_TIERS = {"device": "device", "host": "host", "storage": "disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A usage and what was said with it.

    `estimated`: some number was impossible, ambiguous or missing. `service_tier`: "" for the standard one.
    `cached_by`: cached tokens by the tier they came from ("device", "host", "disk"), where an engine tells; otherwise all
    of them under "provider". `worker`: which of a router's workers computed it, and `expected_hit_rate` the share of the
    prompt that the router believed it to hold (None: not told).
    """

    usage: Usage
    estimated: bool = False
    service_tier: str = ""
    cached_by: dict[str, int] = field(default_factory=dict)
    worker: str = ""
    expected_hit_rate: float | None = None


def usage_of(report: Any) -> Usage | None:
    """The usage in `report`, as in `reported`."""
    read = reported(report)
    return None if read is None else read.usage


def reported(report: Any) -> Reported | None:
    """Read a usage report: a mapping or an object, the usage itself or the response that holds it.

    None where it says nothing, or only zeros.
    """
    body = plain(report)
    told = _told(body)
    reading = _Reading(told, plain(body.get("timings")))
    usage = reading.usage()
    if usage is None:
        return None
    worker, hit_rate = routed(body)
    estimated = not reading.clean
    if hit_rate and not usage.cached_tokens and not reading.says_cached:  # its worker told nothing: the router's belief
        room = usage.input_tokens - usage.cache_write_tokens
        usage, estimated = replace(usage, cached_tokens=min(room, round(hit_rate * usage.input_tokens))), True
    return Reported(
        usage=usage,
        estimated=estimated,
        service_tier=_service_tier(body, told),
        cached_by=_cached_by(plain(body.get("sglext")), usage),
        worker=worker,
        expected_hit_rate=hit_rate,
    )


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports of one call: the later counts, but neither its nulls nor its zeros (nor less) undo what was said."""
    result = dict(earlier)
    for name, value in later.items():
        known = result.get(name)
        if isinstance(value, Mapping):
            result[name] = merged(known if isinstance(known, Mapping) else {}, value)
        elif value is not None and not (known and _says_nothing(value)):
            result[name] = value
    return result


def routed(body: Mapping[str, Any]) -> tuple[str, float | None]:
    """What Dynamo's `nvext` says of a call: its worker ("" where it does not), and what the router expected of its cache."""
    nvext = plain(body.get("nvext"))
    worker = plain(nvext.get("worker_id")).get("decode_worker_id")
    rate = plain(nvext.get("timing")).get("kv_hit_rate")
    known = isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < _MOST_WORKER
    told = str(worker) if known else ""
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
        return told, None
    return told, float(rate)


def _says_nothing(value: Any) -> bool:
    return value == "" or (isinstance(value, int | float) and value <= 0)


_READ = ("usage", "timings", "sglext", "nvext", "service_tier")
_REPORTING = {*_READ, "x_groq", "choices"}


def report_in(chunk: Any) -> dict[str, Any]:
    """The parts of a response or of a stream's chunk that `reported` reads; {} where there are none."""
    if type(chunk) is dict and chunk.keys().isdisjoint(_REPORTING):
        return {}
    found = {}
    for name in _READ:
        value = _get(chunk, name)
        if value is not None:
            found[name] = value if isinstance(value, str) else plain(value)
    beside = _get(_get(chunk, "x_groq"), "usage")  # Groq's streams
    choices = _get(chunk, "choices")
    if beside is None and isinstance(choices, list | tuple) and choices:
        beside = _get(choices[0], "usage")  # Moonshot's
    if not found.get("usage") and beside is not None:
        found["usage"] = plain(beside)
    return found


def plain(value: Any) -> Mapping[str, Any]:
    """A mapping or an object as a mapping; {} for anything else."""
    if value is None:
        return {}
    if type(value) is dict or isinstance(value, Mapping):  # asking an abstract class takes a third of a microsecond
        return value
    dump = getattr(value, "model_dump", None)
    try:
        if callable(dump):
            dumped = dump(warnings=False)
            return dumped if isinstance(dumped, Mapping) else {}
        return dict(vars(value))
    except Exception:  # a foreign object; it says nothing that we could read
        return {}


def _get(value: Any, name: str) -> Any:
    return value.get(name) if type(value) is dict or isinstance(value, Mapping) else getattr(value, name, None)


def _told(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The usage itself, inside whatever holds it."""
    for name in _INSIDE:
        inner = plain(body.get(name))
        if inner:
            return inner
    return body


class _Reading:
    """One report being read; `clean` becomes False at the first number that cannot be right."""

    def __init__(self, told: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        self.told = told
        self.timings = timings
        self.clean = True

    def usage(self) -> Usage | None:
        in_details, out_details = self._details(_IN_DETAILS), self._details(_OUT_DETAILS)
        given = self._first(self.told, _IN)
        cached, written, long = self._cache(in_details)
        read = given or 0
        if given is None and "prompt_cache_hit_tokens" in self.told:
            read = cached + (self._first(self.told, ("prompt_cache_miss_tokens",)) or 0)
        elif given is None and ("cache_n" in self.timings or "prompt_n" in self.timings):
            read, cached = self._llama()
        elif given is None and "tokens_evaluated" in self.told:
            read, cached = self._llama_native()
        elif not cached and self.timings:
            cached = self._first(self.timings, ("cache_n",)) or 0
        read += self._first(self.told, _TOOL_PROMPT) or 0
        beside = self._first(self.told, _CACHED_BESIDE) or 0
        beside_written, beside_long = self._written_beside()
        if (beside or beside_written) and not self._is_inside(read, beside + beside_written, cached, in_details):
            read += beside + beside_written
        if beside or beside_written:
            cached, written, long = max(cached, beside), max(written, beside_written), max(long, beside_long)
        said, thought = self._output(read, out_details)
        if read == 0 and said == 0:
            return None
        self.clean = self.clean and read > 0
        cached, room = self._bounded(cached, read), read
        written = self._bounded(written, room - cached)
        return Usage(
            input_tokens=read,
            cached_tokens=cached,
            output_tokens=said,
            calls=1,
            reasoning_tokens=self._bounded(thought, said),
            cache_write_tokens=written,
            cache_write_long_tokens=self._bounded(long, written),
        )

    @property
    def says_cached(self) -> bool:
        """Whether it speaks of cached tokens at all, if only of none."""
        details = self._details(_IN_DETAILS)
        names = (*_CACHED, *_CACHED_BESIDE)
        return any(details.get(name) is not None for name in _CACHE_READ) or any(name in self.told for name in names)

    # -- the input

    def _cache(self, details: Mapping[str, Any]) -> tuple[int, int, int]:
        """Cached, written, and written for long, as far as they are told inside the input."""
        cached = self._first(details, _CACHE_READ)
        if not cached:
            cached = self._first(self.told, _CACHED)
        by_time = {**details, **plain(details.get("cache_write_tokens_details"))}
        long = self._first(by_time, _LONG) or 0
        short = self._first(by_time, _SHORT) or 0
        written = self._first(details, _CACHE_CREATION) or 0
        return cached or 0, max(written, short + long), long

    def _written_beside(self) -> tuple[int, int]:
        by_time = plain(self.told.get("cache_creation"))
        long = self._first(by_time, _LONG) or 0
        short = self._first(by_time, _SHORT) or 0
        return max(self._first(self.told, _WRITTEN_BESIDE) or 0, short + long), long

    def _is_inside(self, read: int, beside: int, cached: int, details: Mapping[str, Any]) -> bool:
        """Whether an input told together with Anthropic's cache counts includes them.

        Anthropic's own and Bedrock's does not. Under OpenAI's names it depends on the proxy: the total tells, or that
        they do not fit in; what remains open is read as beside, and marked.
        """
        if "prompt_tokens" not in self.told:
            return "input_token_details" in self.told  # LangChain's sums include everything
        total = self._first(self.told, _TOTAL)
        said = self._first(self.told, _OUT) or 0
        if total == read + said + beside or beside > read:
            return False
        if cached or plain(details):
            return True
        self.clean = False
        return False

    def _llama(self) -> tuple[int, int]:
        """llama.cpp's timings: what it reused and what it computed."""
        cached = self._first(self.timings, ("cache_n",)) or 0
        return cached + (self._first(self.timings, ("prompt_n",)) or 0), cached

    def _llama_native(self) -> tuple[int, int]:
        """llama.cpp without timings: `tokens_cached` is what its slot holds now; it may include the answer."""
        read = self._first(self.told, ("tokens_evaluated",)) or 0
        held = self._first(self.told, ("tokens_cached",)) or 0
        self.clean = self.clean and not held
        return read, held if held <= read else 0

    # -- the output

    def _output(self, read: int, details: Mapping[str, Any]) -> tuple[int, int]:
        said = self._first(self.told, (*_OUT, "tokens_predicted"))
        if said is None:
            said = self._first(self.timings, ("predicted_n",))
        total = self._first(self.told, _TOTAL)
        if said is None and total is not None:
            said = max(0, total - read)
        said = said or 0
        thought = self._first(details, _REASONING)
        if thought is None:
            thought = self._first(self.told, ("reasoning_tokens",))
        beside = self._first(self.told, _THOUGHT_BESIDE)
        if beside is not None:  # Gemini's candidates are without their thoughts
            return said + beside, beside
        thought = thought or 0
        if thought and total == read + said + thought:  # xAI's are too
            return said + thought, thought
        return said, thought

    # -- numbers

    def _details(self, names: tuple[str, ...]) -> Mapping[str, Any]:
        for name in names:
            found = self.told.get(name)
            if found:
                return plain(found)
        return {}

    def _first(self, given: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
        """The first of these that says more than zero, else zero if one says so, else None."""
        first: int | None = None
        for name in names if given else ():
            value = given.get(name)
            number = None if value is None else self._number(value)
            if not first and number is not None:
                first = number
        return first

    def _number(self, value: Any) -> int | None:
        if isinstance(value, Mapping):
            return None  # the details of something, under a name that also stands for a number
        if isinstance(value, str):
            self.clean = False
            try:
                value = float(value)
            except ValueError:
                return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not 0 <= value <= _MOST or value != int(value):
            self.clean = False
        if not good or value > _MOST:
            return None
        return max(0, int(value))

    def _bounded(self, value: int, most: int) -> int:
        if value > most:
            self.clean = False
            return most
        return value


def _prefixed(name: str) -> tuple[str, ...]:
    """LangChain's keys for service tiers: `priority_cache_read`."""
    return tuple(f"{tier}_{name}" for tier in _TIER_PREFIXES)


_CACHE_READ = ("cached_tokens", "cache_read", *_prefixed("cache_read"))
_CACHE_CREATION = (*_WRITTEN, *_prefixed("cache_creation"))
_REASONING = (*_THOUGHT, *_prefixed("reasoning"))


def _service_tier(body: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    for given in (told.get("service_tier"), body.get("service_tier")):
        if isinstance(given, str) and given:
            return "" if given.lower() in _STANDARD else given.lower()
    for details in (plain(told.get(name)) for name in (*_IN_DETAILS, *_OUT_DETAILS)):
        for tier in _TIER_PREFIXES:
            if any(name == tier or name.startswith(f"{tier}_") for name in details):
                return tier
    return ""


def _cached_by(told: Mapping[str, Any], usage: Usage) -> dict[str, int]:
    """SGLang's split by tier, where it is one."""
    details = plain(told.get("cached_tokens_details"))
    split = {tier: details[name] for name, tier in _CACHE_TIERS.items() if details.get(name) is not None}
    if split and _are_counts(split) and sum(split.values()) == usage.cached_tokens:
        return {tier: tokens for tier, tokens in split.items() if tokens}
    return {"provider": usage.cached_tokens} if usage.cached_tokens else {}


def told_beside(usage: Usage, parts: Mapping[str, Any]) -> tuple[Usage, dict[str, int]] | None:
    """A usage and its cached tokens by tier, as they were told elsewhere than in the answer.

    None where they cannot be this call's: no counts, more than the answer said, or more than the prompt has room for.
    """
    if not _are_counts(parts):
        return None
    by = {tier: tokens for tier, tokens in parts.items() if tokens}
    cached, room = sum(by.values()), usage.cached_tokens or usage.input_tokens - usage.cache_write_tokens
    if not by or cached > room:
        return None
    return (usage if usage.cached_tokens else replace(usage, cached_tokens=cached)), by


def _are_counts(parts: Mapping[str, Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in parts.values())
