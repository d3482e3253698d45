"""Responses: calls, text and thoughts of models that have marks of their own, by transformers' response parser.

Covers `TemplateGate`: a Gate (`toolcalls.py`) over the parser, by the tokenizer's own response template or by that of a
family we know (`families.py`). Does not cover: <tool_call> tags. A mark that is a control token counts only as one:
spelled by text, inside of an argument for instance, it is text. What is no valid call stays text, and reading begins anew
behind it.
"""

from __future__ import annotations

import json
from copy import copy
from functools import partial
from typing import Any

from agentkv.engine.local.aside import Aside
from agentkv.engine.local.families import Family
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import Wanted

BREAK = "\ufdd2"
"""Stands inside of spelled control tokens while the parser reads them (a Unicode noncharacter)."""
_CHANNELS = ("<|channel|>", "<|start|>", "<|message|>")
_RECIPIENT = "to=functions."
_THOUGHTS = frozenset({"reasoning", "reasoning_content", "thinking"})
"""What response templates call them."""
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class TemplateGate:
    """`tokenizer` is transformers', `tokeniser` ours of the same model."""

    sees_control = True
    waits = False

    def __init__(
        self,
        tokenizer: Any,
        tokeniser: Tokeniser,
        *,
        prompt: str,
        tools: list[dict[str, Any]],
        family: Family | None = None,
    ) -> None:
        template = None if family is None else family.template
        self.tells_thoughts = _tells_thoughts(template or tokenizer.response_template)
        self._new_parser = partial(tokenizer.get_response_parser, template, tools=tools)
        self._parser = self._new_parser(prefix=prompt if family is None else "")
        self._tokeniser = tokeniser
        self._names = {tool.get("function", tool)["name"] for tool in tools} if family and family.bare else None
        self.hides = family is not None and family.always
        self.aside = Aside()
        self.unfinished: list[Wanted] = []
        self._calls: list[Wanted] = []
        self._called = ""  # what they were written as
        self._region: str | None = None  # that the parser is in; None between regions
        self._beginning = False  # the last control token may be the first of a mark
        self._marked = self._talks = False  # there was a channel; there was text before any
        self._waiting = ""  # may become a spelled control token
        self._pending = ""  # was read and not shown, since the last region that ended
        self._follow(self._parser.initial_events)

    @property
    def thinks(self) -> bool:
        """True while a thought is written."""
        return self._region in _THOUGHTS

    @property
    def inside(self) -> bool:
        """True where no stop text is looked for."""
        return self.thinks

    def feed(self, text: str) -> str:
        """The part that may be shown now."""
        self._waiting = self._tokeniser.spelled_apart(self._waiting + text.replace(BREAK, "\ufffd"), BREAK)
        keep = self._tokeniser.begun_control(self._waiting)
        ready = self._waiting[: len(self._waiting) - keep]
        self._waiting = self._waiting[len(ready) :]
        return self._plain(ready)

    def control(self, text: str) -> str:
        """The model wrote a control token, spelled `text`; what may be shown now."""
        shown = self._rest_of_text()
        self._marked = self._marked or text in _CHANNELS
        if self.hides and text == "<|channel|>":
            self._pending = self._pending if _RECIPIENT in self._pending else ""
        before = self._region
        shown += self._read(text)
        self._beginning = self._region is None and before is None
        return shown

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:
        """The rest that may be shown, and the calls."""
        shown = self._rest_of_text()
        if self.thinks:
            self._rest_of_thought()
        if cut and self._inside():  # half of what the model meant is not what it meant
            return shown + _clean(self._called) + self._lost(), []
        try:
            _, events = self._parser.finalize()
        except _BROKEN:
            return shown + self._lost(), self._calls
        shown += self._follow(events)
        return shown + ("" if self._marked or not self.hides else self._lost()), self._calls

    def _rest_of_thought(self) -> None:
        """What may have been the beginning of its end."""
        try:
            _, events = copy(self._parser).finalize()
        except _BROKEN:
            return
        for event in events:
            if event["type"] == "region_chunk" and event.get("field") in _THOUGHTS:
                self.aside.think(_clean(self._tokeniser.without_controls(event.get("text") or "")))

    def _inside(self) -> bool:
        """True if the last that was written belongs to a call, or may begin one."""
        if self._beginning or (self._region is not None and self._region != "content") or self._pending.strip():
            return True
        try:
            _, events = copy(self._parser).finalize()
        except _BROKEN:
            return True
        return any(self._tokeniser.spells_control(event.get("text") or "") for event in events)

    def _rest_of_text(self) -> str:
        text, self._waiting = self._waiting, ""
        return self._plain(text)

    def _plain(self, text: str) -> str:
        if not text:
            return ""
        self._beginning = self._beginning and not text.strip()
        self._pending += text
        shown = self._read(text)
        if self.hides and not self._marked and (self._talks or not _may_begin(self._pending.lstrip(), _RECIPIENT)):
            self._talks = True  # without any mark
            shown, self._pending = shown + _clean(self._pending), ""
        return shown

    def _read(self, text: str) -> str:
        """The parser raises at the end of a call that is none: that one is text."""
        try:
            return self._follow(self._parser.feed(text))
        except _BROKEN:
            lost = self._lost()
            self._parser = self._new_parser(prefix="")
            self._region, self._pending = None, ""
            return lost

    def _follow(self, events: list[dict[str, Any]]) -> str:
        """What the parser found: the text to be shown."""
        shown = ""
        for event in events:
            kind, field = event["type"], event.get("field")
            if kind == "region_open":
                self._region = field
                if field in _THOUGHTS and self.aside.thought:
                    self.aside.think("\n")
            elif kind == "region_chunk" and field in _THOUGHTS:
                self.aside.think(_clean(self._tokeniser.without_controls(event.get("text") or "")))
            elif kind == "region_chunk" and field == "content":
                text = event.get("text") or ""
                shown += _clean(self._tokeniser.without_controls(text))
                self._pending = self._pending.partition(text)[2]
            elif kind == "region_close" and field == "tool_calls":
                shown += self._called_now(event.get("value"))
            elif kind == "region_close":
                self._region = None
                self._pending = self._pending if field == "content" else ""
        return shown

    def _called_now(self, value: Any) -> str:
        """A region of calls has ended; its text, if they are none."""
        try:
            calls = [_wanted(call) for call in (value if isinstance(value, list) else [value])]
        except _BROKEN:
            calls = []
        valid = calls and (self._names is None or all(call.name in self._names for call in calls))
        text = "" if valid else self._lost()
        if valid:
            self._calls += calls
            self._called += self._pending
        self._region, self._pending = None, ""
        return text

    def _lost(self) -> str:
        """What was read and would never be shown, as text; hidden thoughts stay hidden."""
        thoughts = self._region not in {None, "content", "tool_calls"}
        hidden = self.hides and self._marked and self._region != "tool_calls"
        return "" if thoughts or hidden else _clean(self._pending)


def _tells_thoughts(template: Any) -> bool:
    fields = template.get("fields") if isinstance(template, dict) else None
    return isinstance(fields, dict) and not _THOUGHTS.isdisjoint(fields)


def _wanted(call: Any) -> Wanted:
    """One call as a template gives it. Raises one of _BROKEN for what is none."""
    call = call.get("function", call)
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    value = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(value, dict):
        raise TypeError("arguments that are no object")
    text = arguments if isinstance(arguments, str) else json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # half a character, which only an escape can hold
        text = json.dumps(value)
    name.encode()
    return Wanted(name=_clean(name), arguments=_clean(text))


def _clean(text: str) -> str:
    return text.replace(BREAK, "")


def _may_begin(text: str, mark: str) -> bool:
    return mark.startswith(text) or text.startswith(mark)
