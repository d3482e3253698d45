"""View: a conversation that grows, as the model sees it: valid, slim, folded, and the same bytes call after call.

Each message passes each stage once, in order, and what came out is only added to: so the next prompt extends the last
one, and the same conversation gives the same prompt in another process. The caller's own messages are never changed.
Covers repair, slimming, notes that stay where they were put, folds that are known. Does not cover making a fold
(`summary/`), recalling memories (`memory/`), nor any model call: those are the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentkv.context.canonical import canonical_tools
from agentkv.context.counter import Counter
from agentkv.context.notebook import Notebook, chain
from agentkv.context.repair import Repair
from agentkv.context.slim import Slimmed, Slimmer
from agentkv.context.slim.marker import READER, without_reader
from agentkv.context.summary import Fold, Folder, Proposal
from agentkv.context.volatile import values_in
from agentkv.core.message import Message, ToolCall, ToolSpec

_NOTABLE = ("user", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What all views of one runtime share. None switches a stage off.

    `as_written`: the engine sends the model's own text of earlier turns again, so broken arguments are left alone.
    `command_of(arguments)` names the command in a tool call's JSON arguments, for the choice of a slimming rule.
    """

    counter: Counter
    notebook: Notebook
    slimmer: Slimmer | None = None
    folder: Folder | None = None
    as_written: bool = False
    command_of: Callable[[str], str] = lambda _arguments: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slim:
    """One tool output that became shorter on its way in."""

    tool: str
    raw_tokens: int
    kept_tokens: int
    rule: str


class View:
    """One conversation. Not thread-safe.

    `scope` names whose it is: folds and notes are found again within one scope only, so that nobody reads what was told
    to somebody else who happened to say the same.
    """

    def __init__(self, stages: Stages, *, scope: str = "") -> None:
        self._stages = stages
        self._scope = scope.encode("utf-8", "surrogatepass")
        self._repair = Repair(as_written=stages.as_written)
        self._calls: dict[str, ToolCall] = {}
        self.raw: tuple[Message, ...] = ()
        """What the caller gave so far."""
        self._plain: list[Message] = []  # repaired and slim, without notes: what digests are made of
        self._shown: list[Message] = []  # the same with notes
        self._digests: list[bytes] = []
        self._notes: dict[int, str] = {}  # what was told, by the number of the message that it stands behind
        self._tokens: list[int] = []
        self._total_tokens = 0
        self._tools: tuple[ToolSpec, ...] = ()
        self.fold: Fold | None = None
        self._sent_messages = 0
        self.sent: tuple[Message, ...] | None = None
        """The prompt that was sent last."""

    def continues(self, messages: tuple[Message, ...]) -> bool:
        """True if `messages` are this conversation, as it is or grown."""
        return len(messages) >= len(self.raw) and messages[: len(self.raw)] == self.raw

    def extend(self, messages: tuple[Message, ...]) -> list[Slim]:
        """Take in what is new in `messages` (which `continues` this view); the outputs that were slimmed."""
        known, slimmed = len(self._plain), []
        for message in messages[len(self.raw) :]:
            for valid in self._repair.feed(message):
                slim = self._add(valid)
                if slim is not None:
                    slimmed.append(slim)
        self.raw = messages
        folder = self._stages.folder
        if folder is not None and known < len(self._plain):
            self.fold = folder.newest(self._digests, known) or self.fold
        return slimmed

    def _add(self, message: Message) -> Slim | None:
        slim = None
        for call in message.tool_calls:
            self._calls[call.id] = call
        if message.role == "tool" and self._stages.slimmer is not None:
            message, slim = self._slimmed(message, self._stages.slimmer)
        digest = chain(self._digests[-1] if self._digests else self._scope, message)
        note = self._stages.notebook.note(digest)
        shown = _with_note(message, note) if note else message
        if note:
            self._notes[len(self._plain)] = note
        tokens = self._stages.counter.message(shown)
        self._plain.append(message)
        self._shown.append(shown)
        self._digests.append(digest)
        self._tokens.append(tokens)
        self._total_tokens += tokens
        return slim

    def _slimmed(self, message: Message, slimmer: Slimmer) -> tuple[Message, Slim | None]:
        call = self._calls.get(message.tool_call_id or "")
        tool = message.name or (call.name if call is not None else "")
        command = self._stages.command_of(call.arguments) if call is not None else ""
        done: Slimmed = slimmer.slim(message.content, tool=tool, command=command)
        text = done.text if done.handle is None or self._reads_outputs else without_reader(done.text)
        if text == message.content:
            return message, None
        slim = Slim(tool=tool, raw_tokens=done.raw_tokens, kept_tokens=done.kept_tokens, rule=done.rule)
        return replace(message, content=text), slim

    def note(self, text: str) -> int:
        """Put `text` behind the newest message, there to stay; the tokens that this adds, 0 where it cannot stand.

        It becomes part of that message's content (a user's or a tool's), so that templates and strict servers that
        want roles to alternate take it. A second note at the same message replaces the first; "" takes it away.
        """
        newest = len(self._plain) - 1
        if not self.takes_note or text == self._notes.get(newest, ""):
            return 0
        shown = _with_note(self._plain[-1], text) if text else self._plain[-1]
        self._stages.notebook.put_note(self._digests[-1], text)
        self._notes[newest] = text
        before, now = self._tokens[-1], self._stages.counter.message(shown)
        self._shown[-1], self._tokens[-1] = shown, now
        self._total_tokens += now - before
        return max(0, now - before)

    @property
    def takes_note(self) -> bool:
        """True if something can be told behind the newest message."""
        return bool(self._plain) and self._plain[-1].role in _NOTABLE and not self._repair.pending()

    @property
    def noted(self) -> str:
        """What was told behind the newest message before, the changing values in it left out."""
        note = self._notes.get(len(self._plain) - 1, "")
        return note.removesuffix(values_in(note)).rstrip("\n")

    @property
    def values_before(self) -> str:
        """The changing values that were told last behind any message but the newest, of those that are not folded."""
        fold, newest = self.fold, len(self._plain) - 1
        seen = (at for at in sorted(self._notes, reverse=True) if fold is None or at >= fold.k or at in fold.pinned)
        return next(filter(None, (values_in(self._notes[at]) for at in seen if at != newest)), "")

    def says(self, text: str) -> bool:
        """True if `text` is part of what was told somewhere in this conversation."""
        return any(text in note for note in self._notes.values())

    def forget_notes(self) -> None:
        """What was told is not to be found again by who happens to say the same."""
        for at in self._notes:
            self._stages.notebook.put_note(self._digests[at], "")

    def refold(self) -> None:
        """Look for a fold that was made since, of any part of this conversation."""
        if self._stages.folder is not None:
            self.fold = self._stages.folder.newest(self._digests) or self.fold

    def adopt(self, fold: Fold) -> None:
        """A fold that was made on the side takes effect now."""
        newer = self.fold is None or fold.k > self.fold.k  # another may have been made in between
        if self._stages.folder is not None and self._digests and newer:
            self.fold = self._stages.folder.record(fold, self._digests[-1])

    def tools(self, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """`tools` in their fixed form and order: the known ones where they stood, new ones behind them."""
        self._tools = canonical_tools(tools, known=self._tools)
        self._repair.offer(tool.name for tool in self._tools)
        return self._tools

    @property
    def _reads_outputs(self) -> bool:
        """True if the agent has the tool that a marker names; one without it would call what is not there."""
        return any(tool.name == READER for tool in self._tools)

    @property
    def tools_now(self) -> tuple[ToolSpec, ...]:
        """The tools as they were sent last."""
        return self._tools

    def prompt(self) -> tuple[Message, ...]:
        """What the next call sends; it is remembered as sent."""
        self.sent = self.prompt_now()
        self._sent_messages = len(self._plain)
        return self.sent + self._repair.pending()

    def prompt_now(self) -> tuple[Message, ...]:
        """The same, not remembered, and without stand-ins for results that are still to come."""
        messages = tuple(self._shown)
        if self.fold is not None and self._stages.folder is not None:
            messages = self._stages.folder.applied(self.fold, messages)
        return messages

    def said(self) -> tuple[Message, ...]:
        """The prompt as it is now, without notes."""
        messages = tuple(self._plain)
        if self.fold is not None and self._stages.folder is not None:
            messages = self._stages.folder.applied(self.fold, messages)
        return messages

    def propose(self) -> Proposal | None:
        """What could be folded and whether it pays; None below the mark, or where nothing folds."""
        folder = self._stages.folder
        if folder is None:
            return None
        tools_tokens = self._stages.counter.tools(self._tools) if self._tools else 0
        if self.fold is None and self._total_tokens + tools_tokens <= folder.soft_tokens:
            return None
        proposal = folder.propose(
            tuple(self._plain),  # a note is told behind a message; a summary is of what was said
            self._digests,
            self._tokens,
            tools_tokens=tools_tokens,
            fold=self.fold,
            breaks_anyway=self.sent is None,
            fresh_tokens=sum(self._tokens[self._sent_messages :]),
        )
        return proposal if proposal.kind != "none" else None

    @property
    def shown_tokens(self) -> int:
        """Tokens of the prompt as it is now, tools left out."""
        if self.fold is None:
            return self._total_tokens
        return sum(self._stages.counter.message(message) for message in self.prompt_now())


def _with_note(message: Message, text: str) -> Message:
    return replace(message, content=f"{message.content}\n\n{text}" if message.content else text)
