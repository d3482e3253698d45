"""Prefix watch: is the new prompt an extension of the last one, and if not, where does it break, why, at what cost?

Covers one session's calls in order, an explanation of each, one warning per cause and place, and counters of all.
Does not cover mending it: `layout.py` builds prompts that do not break. Positions are told in logs, prompt text never.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentkv.context.breaks import (
    PROVIDER,
    VALUES,
    Break,
    Cause,
    find_break,
    first_difference,
    first_of,
    messages_break,
    shared_chars,
    shared_messages,
    tools_break,
)
from agentkv.context.canonical import raw_tools_text
from agentkv.context.explain import ADVICE, Count, Explanation, Ruler, message_text, size_bytes
from agentkv.core.message import Message, ToolSpec
from agentkv.core.usage import Usage
from agentkv.log import count as count_event
from agentkv.log import failed

__all__ = ["Break", "Cause", "PrefixWatch", "find_break"]

MAX_EXPLANATIONS = 256
MAX_MODELS = 8
SAME_SHARE = 0.5
"""First messages that share less than this of their characters at both ends belong to different prompts."""
FAR_BELOW = 0.5
"""A cache was missed if less than this share of what could be reused was reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A prompt that was sent. `input_tokens`: as the provider counted it, else as we do."""

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    model: str = ""
    template: str = ""
    answer: Message | None = None
    usage: Usage | None = None
    at_s: float | None = None
    input_tokens: int | None = None


class PrefixWatch:
    """Remembers the last prompt of one session and tells when the next one does not extend it.

    Not thread-safe: a session has one call at a time. Each cause is logged once per watch and message, every one is
    counted. `count` counts tokens of a text (each message once). `lifetime_s` is how long the provider keeps a cache
    that nobody uses, `min_tokens` the shortest prompt that it caches: with these and the reported usage a miss that is
    not the prompt's fault gets its own name. warn=False: nothing is logged, as somebody reads the explanations.
    """

    def __init__(
        self,
        session: str = "",
        *,
        count: Count | None = None,
        lifetime_s: float | None = None,
        min_tokens: int = 0,
        warn: bool = True,
    ) -> None:
        self.session = session
        self.calls = 0
        self.breaks = 0
        self.last_break: Break | None = None
        self.causes: Counter[Cause] = Counter()
        """How often each cause was seen: breaks (a second one behind the first too), declared folds, the provider's own."""
        self.lost_tokens = 0
        """Tokens computed again because of breaks; nothing for declared folds and the provider's causes."""
        self._explanations: deque[Explanation] = deque(maxlen=MAX_EXPLANATIONS)
        self._lifetime_s = float("inf") if lifetime_s is None else lifetime_s
        self._min_tokens = min_tokens
        self._ruler = Ruler(count)
        self._counts = count is not None
        self._last = _Prompt()
        self._by_model: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._declared: Cause | None = None
        self._reports_cached = False
        self._warn = warn
        self._warned: set[tuple[int, Cause]] = set()

    def see(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        model: str = "",
        template: str = "",
        usage: Usage | None = None,
        at_s: float | None = None,
        answer: Message | None = None,
    ) -> Break | None:
        """Compare with the prompt seen before, remember this one; `explain()[-1]` then tells all about it.

        `template`: a text that stands for the chat template or the fixed instructions. `usage`: only from a provider
        that reports cached tokens. `answer`: what the model answered, where it is known: the next prompt should hold
        it as it came.
        """
        prompt = _Prompt(
            messages=tuple(messages), tools=tuple(tools), model=model, template=template, answer=answer, usage=usage,
            at_s=at_s,
        )  # fmt: skip
        self.calls += 1
        found = self._compared(prompt) if self._last.messages else None
        told = self._explained(prompt, found)
        declared, self._declared = self._declared is not None, None
        self._remember(prompt)
        self._explanations.append(told)
        self._tell(told, found, declared=declared)
        return None if declared else found

    def explain(self) -> tuple[Explanation, ...]:
        """The last MAX_EXPLANATIONS calls, one explanation each."""
        return tuple(self._explanations)

    def is_another_prompt(self, messages: Sequence[Message]) -> bool:
        """True if the first message is another one altogether, so that nobody meant to extend the prompt before.

        A first message that is mostly the same (but for a clock, a counter, a block of memories) is the same prompt,
        broken.
        """
        if not self._last.messages or not messages or self._last.messages[0] is messages[0]:
            return False
        found = find_break(self._last.messages[:1], messages[:1])
        if found is None or found.cause in VALUES:
            return False
        was, now = message_text(self._last.messages[0]), message_text(messages[0])
        return found.cause == "role changed" or shared_chars(was, now) < SAME_SHARE * max(len(was), len(now))

    def expect_break(self, cause: Cause | None = None) -> None:
        """The next prompt changes the prefix on purpose.

        With a cause ("fold") it is explained under that name and counts as no break; without one it is the first of
        another conversation and compared with nothing.
        """
        if cause is None:
            self._last = _Prompt()
            self._by_model.clear()
        self._declared = cause

    def _remember(self, prompt: _Prompt) -> None:
        input_tokens = self._ruler.tokens if prompt.usage is None else prompt.usage.input_tokens
        self._last = replace(prompt, input_tokens=input_tokens)
        self._reports_cached |= prompt.usage is not None and prompt.usage.cached_tokens > 0
        self._by_model[prompt.model] = prompt.messages
        self._by_model.move_to_end(prompt.model)
        while len(self._by_model) > MAX_MODELS:
            self._by_model.popitem(last=False)

    # -- where

    def _compared(self, prompt: _Prompt) -> Break | None:
        old = self._last
        found = first_of(tools_break(old.tools, prompt.tools), messages_break(old.messages, prompt.messages))
        if old.model != prompt.model:
            return first_of(Break(message=-1, character=0, role="model", cause="model switch"), found)
        if old.template != prompt.template:
            return replace(found or Break(message=-1, character=0, role="template", cause="template"), cause="template")
        return found or self._answer_break(prompt)

    def _answer_break(self, prompt: _Prompt) -> Break | None:
        """Whether the model's answer was sent back as something else. Leaving it out altogether costs nothing."""
        old = self._last
        given = prompt.messages[len(old.messages) : len(old.messages) + 1]
        if old.answer is None or not given or given[0].role != "assistant":
            return None
        found = messages_break((old.answer,), given)
        return None if found is None else replace(found, message=len(old.messages))

    def _place(self, prompt: _Prompt, found: Break) -> tuple[int, int | None]:
        """Byte and token of the first difference (of what another model has not seen, after a switch)."""
        if found.cause == "model switch":
            return self._ruler.at(shared_messages(self._by_model.get(prompt.model, ()), prompt.messages) or -1, "")
        if found.message < 0:
            texts = (raw_tools_text(self._last.tools), raw_tools_text(prompt.tools))
            return self._ruler.at(-1, "" if found.role == "template" else texts[0][: first_difference(*texts)])
        olds, news = (*self._last.messages, self._last.answer)[found.message :], prompt.messages[found.message :]
        if not news or olds[0] is None:
            return self._ruler.at(found.message, "")
        was, now = message_text(olds[0]), message_text(news[0])
        return self._ruler.at(found.message, was[: first_difference(was, now)])

    # -- what it cost

    def _explained(self, prompt: _Prompt, found: Break | None) -> Explanation:
        old, ruler = self._last, self._ruler
        old_bytes, old_tokens = ruler.bytes, ruler.tokens
        kept = shared_messages(old.messages, prompt.messages)
        ruler.fit(raw_tools_text(prompt.tools), kept, prompt.messages[kept:])
        idle_s = None if prompt.at_s is None or old.at_s is None else max(0.0, prompt.at_s - old.at_s)
        told = Explanation(
            call=self.calls, cause=None, message=len(old.messages), character=0, byte=old_bytes, token=old_tokens,
            prompt_bytes=ruler.bytes, prompt_tokens=ruler.tokens, idle_s=idle_s,
            cached_tokens=None if prompt.usage is None else prompt.usage.cached_tokens,
        )  # fmt: skip
        if found is not None:
            byte, token = self._place(prompt, found)
            if old.answer is not None and found.message == len(old.messages):
                answered = message_text(old.answer)
                old_bytes += size_bytes(answered)
                old_tokens = None if old_tokens is None else old_tokens + ruler.tokens_of(answered)
            lost_tokens = None
            if token is not None and old_tokens is not None and ruler.tokens is not None:
                lost_tokens = max(0, min(old_tokens, ruler.tokens) - token)
            told = replace(
                told, cause=self._declared or found.cause, message=found.message, character=found.character, byte=byte,
                token=token, role=found.role, value=found.value, also=found.also, before=found.before, after=found.after,
                lost_bytes=max(0, min(old_bytes, ruler.bytes) - byte), lost_tokens=lost_tokens,
            )  # fmt: skip
        return self._with_usage(told, prompt)

    def _with_usage(self, told: Explanation, prompt: _Prompt) -> Explanation:
        """What the provider reported: tokens where nobody counts, and a name for a miss that is not the prompt's."""
        usage = prompt.usage
        if usage is None:
            return told
        if not self._counts and told.prompt_bytes:
            share = usage.input_tokens / told.prompt_bytes
            told = replace(
                told, estimated=True, token=round(told.byte * share), lost_tokens=round(told.lost_bytes * share),
                prompt_tokens=usage.input_tokens,
            )  # fmt: skip
        reusable = min(self._last.input_tokens or 0, usage.input_tokens) if told.cause is None else told.token or 0
        expired = told.idle_s is not None and told.idle_s > self._lifetime_s
        if told.call == 1 or not self._last.messages or usage.cached_tokens > reusable * FAR_BELOW:
            return told
        if told.cause is not None:
            return replace(told, cause="cache expired", also=told.cause) if expired else told
        cause: Cause
        if reusable < self._min_tokens:
            cause = "below minimum size"
        elif expired:
            cause = "cache expired"
        elif self._reports_cached:
            cause = "cache missed"
        else:
            return told
        return replace(told, cause=cause, lost_tokens=reusable - usage.cached_tokens)

    # -- telling

    def _tell(self, told: Explanation, found: Break | None, *, declared: bool) -> None:
        if told.cause is None:
            return
        self.causes.update(cause for cause in (told.cause, told.also) if cause is not None)
        if declared:
            count_event("prefix_folded")
            return
        if found is not None:
            self.breaks += 1
            self.last_break = found
        if told.cause not in PROVIDER:
            self.lost_tokens += told.lost_tokens or 0
        event = "prefix_not_cached" if told.cause in PROVIDER else "prefix_broken"
        key = (told.message if told.cause not in PROVIDER else 0, told.cause)
        if key in self._warned or not self._warn:
            count_event(event)
            return
        self._warned.add(key)
        failed(
            event, session=self.session, cause=told.cause, message=told.message, character=told.character,
            byte=told.byte, token=told.token, role=told.role, lost_tokens=told.lost_tokens, advice=ADVICE[told.cause],
        )  # fmt: skip
