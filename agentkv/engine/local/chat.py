"""Chat: messages and tools become the text that the model's own template makes of them.

Covers: what the template can do (found by trying it), the stand-ins for what it cannot, guarding, its refusals. Does
not cover: reading the answer (`toolcalls.py`), tokens (`tokeniser.py`).

Stand-ins. Tools, for templates that ignore them: the PREAMBLE at the head of the system message, one JSON object per
tool. An assistant's calls: the text that the model wrote, byte for byte, if nobody edited the turn, else <tool_call> tags. Tool results, for
templates without a tool role: a user turn with one <tool_response> element for each result.

Thoughts. A turn's are handed to a template that reads them, by the name by which it does; what becomes of them is its own
affair. Of a turn with calls that nobody edited they are known here, whether its sender kept them or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.engine.local.families import family_of
from agentkv.engine.local.switches import Switches
from agentkv.engine.local.thoughts import marks_of
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import CLOSE, OPEN
from agentkv.engine.local.transcript import Transcript
from agentkv.errors import RequestInvalid, TemplateRejected

PREAMBLE = (
    "You can use the tools below, one JSON object per line. To use one, write\n"
    f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}\n'
    "and wait for its result.\n"
)
_PROBE = "agentkv-probe"
_ONE_OF_BOTH = "thinking"
_REMOVED = re.compile(r"""replace\(\s*(['"])(.*?)\1\s*,\s*(['"])\3\s*\)""")
"""How templates remove words from texts, such as those that switch thinking."""
_THOUGHTS = ("reasoning_content", _ONE_OF_BOTH, "reasoning")
"""By what names templates read a turn's thoughts; the second is GPT-OSS's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A turn with tool calls: what the model wrote (`raw`), and what callers were told of it."""

    raw: str
    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""

    def unchanged(self, message: Message) -> bool:
        """True if `message` still says what was told: nobody edited text, calls or arguments before sending it back."""
        if message.content.strip() != self.content.strip() or len(message.tool_calls) != len(self.calls):
            return False
        told = {call.id: call for call in self.calls}
        return all(call.id in told and _same(call, told[call.id]) for call in message.tool_calls)


RawOf = Callable[[str], Written | None]
"""What the model wrote in the turn that asked for this tool call, if it is known."""


class Chat:
    """One model's chat template."""

    def __init__(self, tokenizer: Any, tokeniser: Tokeniser, name: str) -> None:
        self._tokenizer = tokenizer
        self._tokeniser = tokeniser
        self._name = name
        self.available = bool(getattr(tokenizer, "chat_template", None))
        source = self._source() if self.available else ""
        self.family = family_of(source)
        """How the model writes calls, if not in <tool_call> tags."""
        words: dict[str, int] = tokenizer.get_added_vocab() if self.available else {}
        hides = self.family is not None and self.family.always
        self.marks = None if hides else marks_of(source, words)
        """Those between which the model thinks."""
        self.thinks = hides or self.marks is not None
        self._thought = next((name for name in _THOUGHTS if re.search(rf"[.'\"]{name}\b", source)), None)
        self._knows_tools = "tools" in source
        self._switches = {
            tools: Switches(self._rendered(tools=tools), tokenizer, name=name, thinks=self.thinks)
            for tools in (False, True)
        }
        self._removed = tuple(found[1] for found in _REMOVED.findall(source) if found[1])
        self._knows_calls = "tool_calls" in source
        self.loops_think = self._thought is not None or not self._knows_calls
        """True if thoughts are sent again while the model calls tools: to a template that reads them, or in its own text."""
        self._wants_text = "arguments is string" in source
        self._knows_results = self.available and self._shows_tool_role()

    def _source(self) -> str:
        """All of the tokenizer's templates: some have one for tools."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def _rendered(self, *, tools: bool) -> str:
        """The template that a call renders, with tools or without."""
        template = self._tokenizer.chat_template if self.available else ""
        if isinstance(template, dict):
            named = "tool_use" if tools and "tool_use" in template else "default"
            template = template.get(named, "")
        return str(template)

    def _shows_tool_role(self) -> bool:
        call = ToolCall(id="call00000", name="probe", arguments="{}")
        turns = [
            Message(role="user", content="Go."),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content=_PROBE, tool_call_id=call.id, name=call.name),
        ]
        try:
            shown = self._apply([self._turn(turn, lambda _id: None, results=True) for turn in turns], None)
        except TemplateRejected:
            return False
        return _PROBE in shown

    def variables(self, effort: str | None, given: Mapping[str, Any], *, tools: bool = False) -> dict[str, Any]:
        """What a call, with tools or without, sets in the template, for `render`; see `Switches.values`."""
        if not self.available:
            return {}
        switches = self._switches[tools and self._knows_tools]
        try:
            values: dict[str, Any] = self._guarded(switches.values(effort, given))
        except RecursionError:
            raise RequestInvalid(
                "chat_template_kwargs are nested too deeply", param="chat_template_kwargs", code="invalid_value"
            ) from None
        return values

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        raw_of: RawOf,
        *,
        go_on: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, up to where the assistant's answer begins; spelled control tokens are marked.

        `go_on`: the last message is the assistant's, and its text ends the prompt: no turn ends or begins after it.

        Raises RequestInvalid if the model has no template or there are no messages, TemplateRejected with the
        template's own words if it refuses.
        """
        if not self.available:
            raise RequestInvalid(
                f"{self._name} has no chat template; load it with chat_template= (Jinja text, or a file with it), or use prompt= "
                "for plain text",
                param="messages",
                code="no_chat_template",
            )
        turns: list[dict[str, Any]] = []
        for message in messages:
            turn = self._turn(message, raw_of, results=self._knows_results)
            if message.role == "tool" and turn["role"] == "user" and turns and turns[-1].get("results"):
                turns[-1]["content"] += "\n" + turn["content"]  # results of parallel calls share one user turn
            else:
                turns.append(turn)
        specs = self._specs(tools)
        if specs and not self._knows_tools:
            turns, specs = _with_preamble(turns, specs), None
        return self._apply(turns, specs, go_on=go_on, variables=variables)

    def begun(self, prompt: str, last: Message, *, goes_on: bool) -> bool:
        """True if `prompt`, rendered from messages of which this is the last, ends inside of a thought."""
        if self.marks is None:
            return False
        opening, closing = self.marks.opening, self.marks.closing
        if goes_on:
            return last.content.lstrip().startswith(opening) and closing not in last.content
        return self._behind(prompt, last).endswith(opening)

    def spared(self, prompt: str, last: Message) -> bool:
        """True if `prompt`, rendered from messages of which this is the last, ends with a thought that is over."""
        return self.marks is not None and self._behind(prompt, last).endswith(self.marks.closing)

    def _behind(self, prompt: str, last: Message) -> str:
        """What the template wrote behind the last message."""
        said = self._guard(last.content).strip()
        place = prompt.rfind(said) if said else -1
        return (prompt if place < 0 else prompt[place + len(said) :]).rstrip()

    def outlived(
        self,
        prompt: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        raw_of: RawOf,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> int | None:
        """So many characters of `prompt` stand in the next one, when its answer has come back without its thought and
        the user has said more; None where the template keeps it, or does not let that be seen.
        """
        thought = f"{_PROBE}-thought"
        more = (Message(role="assistant", content=_PROBE, reasoning=thought), Message(role="user", content=_PROBE))
        try:
            text = self.render([*messages, *more], tools, raw_of, variables=variables)
        except RequestInvalid:
            return None
        return None if thought in text else Transcript(text=text).shared_chars(prompt)

    def _specs(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
        try:
            return [self._guarded(spec_of(tool)) for tool in tools] or None
        except RecursionError:
            raise RequestInvalid(
                "the schema of a tool is nested too deeply", param="tools", code="invalid_value"
            ) from None

    def _turn(self, message: Message, raw_of: RawOf, *, results: bool) -> dict[str, Any]:
        guard = self._guard
        content = guard(message.content)
        if message.role == "tool":
            if not results:
                text = f"<tool_response>\n{content}\n</tool_response>"
                return {"role": "user", "content": text, "results": True}
            turn: dict[str, Any] = {"role": "tool", "content": content}
            fields = {"tool_call_id": message.tool_call_id, "name": message.name}
            return turn | {field: guard(value) for field, value in fields.items() if value is not None}
        if message.role != "assistant":
            return {"role": message.role, "content": content}
        if not message.tool_calls:
            return {"role": "assistant", "content": content, **self._thoughts(message.reasoning)}
        known = raw_of(message.tool_calls[0].id)
        known = known if known is not None and known.unchanged(message) else None
        if self._knows_calls:
            calls = [self._call(call) for call in message.tool_calls]
            thought = message.reasoning or ("" if known is None else known.reasoning)
            if content and self._thought == _ONE_OF_BOTH:
                thought = ""  # it refuses a turn with calls that has both
            return {"role": "assistant", "content": content, "tool_calls": calls, **self._thoughts(thought)}
        return {"role": "assistant", "content": guard(_tagged(message) if known is None else known.raw)}

    def _thoughts(self, text: str) -> dict[str, str]:
        return {self._thought: self._guard(text)} if text and self._thought else {}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        guard = self._guard
        try:
            arguments = self._guarded(self._arguments(call))
        except RecursionError:  # deeper than any template can write it
            arguments = guard(call.arguments)
        return {
            "id": guard(call.id),
            "type": "function",
            "function": {"name": guard(call.name), "arguments": arguments},
        }

    def _arguments(self, call: ToolCall) -> Any:
        """The model's own JSON text where the template takes text; else the object, if it is one. None at all is {}."""
        if self._wants_text:
            return call.arguments
        if not call.arguments.strip():
            return {}
        try:
            parsed = json.loads(call.arguments)
        except ValueError:
            return call.arguments
        if parsed is None:
            return {}
        return _whole_characters(parsed) if isinstance(parsed, dict) else call.arguments

    def _guard(self, text: str) -> str:
        """Text of users and tools as the template may have it."""
        return self._tokeniser.guard_removed(self._tokeniser.guard(text), self._removed)

    def _guarded(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._guarded(item) for item in value]
        return self._guard(value if isinstance(value, str) else str(value))

    def _apply(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        go_on: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                **(variables or {}),
            )
        except Exception as error:  # the template is a program of the model's author: it may raise anything
            raise TemplateRejected(
                f"the chat template of {self._name} refused the messages: {error}", param="messages"
            ) from error
        return self._tokeniser.unescaped(text)


def spec_of(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the form that templates and OpenAI's API share."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _with_preamble(turns: list[dict[str, Any]], specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(spec["function"], ensure_ascii=False) for spec in specs)
    preamble = f"{PREAMBLE}{lines}"
    if turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{preamble}\n\n{turns[0]['content']}"}, *turns[1:]]
    return [{"role": "system", "content": preamble}, *turns]


def _tagged(message: Message) -> str:
    calls = (f'{OPEN}{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}{CLOSE}' for c in message.tool_calls)
    return "\n".join([message.content, *calls] if message.content else calls)


def _same(one: ToolCall, other: ToolCall) -> bool:
    """True if both call the same with the same arguments, however these are spelled."""
    if one.name != other.name:
        return False
    return one.arguments == other.arguments or _canonical(one.arguments) == _canonical(other.arguments)


def _whole_characters(value: Any) -> Any:
    """Halves of characters, which JSON can hold as escapes and no prompt can, become U+FFFD."""
    text = json.dumps(value, ensure_ascii=False)
    return value if text.isascii() else json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _canonical(arguments: str) -> str:
    """One spelling for equal JSON (true is not 1, as it would be for Python); any other text as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
