"""Any messages, in any order, with notes, folds, resumes and forks: what is sent is valid and only grows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv.context.counter import Counter
from agentkv.context.notebook import Notebook
from agentkv.context.outputs import Outputs
from agentkv.context.slim import Slimmer
from agentkv.context.summary import Folder
from agentkv.context.view import Stages, View
from agentkv.core.message import Message, ToolCall

ids = st.sampled_from(["a", "b", "c", "", "x" * 2000])
texts = st.text(max_size=40) | st.just("line of a log\n" * 400) | st.just("ERROR: port 6543 refused")
calls = st.lists(
    st.builds(ToolCall, id=ids, name=st.sampled_from(["look", "run"]), arguments=st.just('{"at": 1}')), max_size=3
)
messages = st.one_of(
    st.builds(Message, role=st.just("user"), content=texts),
    st.builds(Message, role=st.just("assistant"), content=texts, tool_calls=calls.map(tuple)),
    st.builds(Message, role=st.just("tool"), content=texts, tool_call_id=ids | st.none()),
    st.builds(Message, role=st.just("system"), content=texts),
)


def count(text: str) -> int:
    """Tokens, roughly; cheap."""
    return len(text) // 4


def fault(prompt: tuple[Message, ...]) -> str:
    """What a strict server would not take; "" for a valid prompt."""
    open_calls: set[str] = set()
    known: set[str] = set()
    for message in prompt:
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                return f"result for {message.tool_call_id!r}, which is not open"
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            return f"{message.role} while {sorted(open_calls)} are open"
        made = [call.id for call in message.tool_calls]
        if len(set(made)) < len(made) or known & set(made) or "" in made:
            return f"ids {made}"
        if message.role == "assistant" and not message.content.strip() and not made:
            return "an empty turn"
        known |= set(made)
        open_calls = set(made)
    return f"{sorted(open_calls)} never answered" if open_calls else ""


class ViewMachine(RuleBasedStateMachine):
    """One conversation, seen through one view after another over one notebook."""

    def __init__(self) -> None:
        super().__init__()
        counter = Counter(count)
        self.notebook = Notebook()
        self.folder = Folder(
            notebook=self.notebook, soft_tokens=300, keep_last=2, window_tokens=2000, count=counter.message, fallback="extract"
        )  # fmt: skip
        self.stages = Stages(
            counter=counter,
            notebook=self.notebook,
            slimmer=Slimmer(outputs=Outputs(), count=count, max_tokens=120),
            folder=self.folder,
        )
        self.raw: tuple[Message, ...] = ()
        self.view = View(self.stages, scope="t")
        self.noted = -1
        self.numbers = 0

    @initialize()
    def begin(self) -> None:
        self.extend(
            [Message(role="system", content="be brief"), Message(role="user", content="the very first request")]
        )

    def extend(self, more: list[Message]) -> None:
        sent, fold = self.view.sent, self.view.fold
        self.raw = (*self.raw, *more)
        assert self.view.continues(self.raw)
        self.view.extend(self.raw)
        prompt = self.view.prompt()
        assert "" == fault(prompt), fault(prompt)
        if sent is not None and self.view.fold is fold:
            assert sent == prompt[: len(sent)], "a prompt that only grows"

    @rule(more=st.lists(messages, min_size=1, max_size=4))
    def add(self, more: list[Message]) -> None:
        self.extend(more)

    @precondition(lambda self: self.noted < len(self.raw))
    @rule()
    def note(self) -> None:
        self.numbers += 1
        self.noted = len(self.raw)
        self.view.note(f"note {self.numbers}")
        self.view.prompt()

    @rule(answer=st.sampled_from(["Goal: all\nFacts:\n- port 6543", "", RuntimeError("down")]), later=st.booleans())
    def fold(self, answer: str | Exception, later: bool) -> None:
        proposal = self.view.propose()
        if proposal is None or proposal.kind != "fold":
            return
        flow = self.folder.flow(proposal, self.view.prompt_now(), record=not later)
        try:
            asked = next(flow)
            while True:
                assert "" == fault(asked), fault(asked)
                asked = flow.send(answer)
        except StopIteration as ended:
            made = ended.value
        if made is None:
            return
        if later:
            self.view.adopt(made)
        else:
            self.view.refold()
        assert "" == fault(self.view.prompt())

    @rule()
    def resume(self) -> None:
        """Another process reads the same conversation from its checkpoint."""
        again = View(self.stages, scope="t")
        again.extend(self.raw)
        assert self.view.prompt() == again.prompt()
        self.view = again

    @rule(share=st.floats(0.3, 1))
    def fork(self, share: float) -> None:
        """Time travel: go on from an earlier point."""
        self.raw = self.raw[: max(2, int(len(self.raw) * share))]
        self.noted = len(self.raw)
        self.view = View(self.stages, scope="t")
        self.view.extend(self.raw)
        assert "" == fault(self.view.prompt())

    @rule()
    def stranger(self) -> None:
        """The same words in another task: no note and no fold of this one is seen there."""
        other = View(self.stages, scope="other")
        other.extend(self.raw)
        assert not any("note " in message.content for message in other.prompt())
        assert other.fold is None

    @invariant()
    def the_first_request_is_there(self) -> None:
        if self.raw:
            assert any("the very first request" in message.content for message in self.view.prompt_now())


ViewMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestViewMachine = ViewMachine.TestCase
