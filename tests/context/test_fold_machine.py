"""Any conversation, folded at any moment with any answer, resumed and forked: the view is always valid."""

import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv.context.notebook import Notebook, chain
from agentkv.context.summary import SUMMARY_MARK, Folder
from agentkv.core.message import Message, ToolCall

SOFT_TOKENS = 240
ANSWERS = {
    "good": "Goal: all of it\nFacts:\n- port {n}\nOpen items:\n- test {n}",
    "long": "Facts:\n" + "- a fact about it\n" * 20_000,
    "empty": "",
    "refusal": "I'm sorry, but I can't do that.",
    "error": RuntimeError("no model"),
}

answers = st.sampled_from(["good", "good", "good", *sorted(ANSWERS)])


def count(message):
    return len(message.content) // 4 + 4 + 3 * len(message.tool_calls)


def size_of(text):
    return count(Message(role="user", content=text))


class Branch:
    """One conversation as a view holds it: looked at once, message by message."""

    def __init__(self):
        self.messages, self.digests, self.tokens = [], [], []
        self.fold, self.sent = None, ()

    def add(self, messages):
        for message in messages:
            self.digests.append(chain(self.digests[-1] if self.digests else b"", message))
            self.messages.append(message)
            self.tokens.append(count(message))

    def start_of(self, length):
        """The same conversation when it had `length` messages, nothing known of it yet."""
        other = Branch()
        other.add(self.messages[:length])
        return other


class FoldMachine(RuleBasedStateMachine):
    """Branches of one conversation, all over one notebook on disk."""

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.notebook = Notebook(self.place.name)
        self.number = 0
        self.told = {}  # digest -> the prompt that was sent when the conversation had come to it
        self.flows = []  # (proposal, sent, fold) of every fold made
        self.branches = []

    @initialize(
        system=st.booleans(), tools_tokens=st.sampled_from([0, 100]), window=st.sampled_from([None, 400]),
        keep_last=st.sampled_from([0, 1, 4]),
    )  # fmt: skip
    def begin(self, system, tools_tokens, window, keep_last):
        self.keep_last = keep_last
        self.folder = self.folder_over(self.notebook, window)
        self.window, self.tools_tokens = window, tools_tokens
        branch = Branch()
        branch.add([Message(role="system", content="be brief")] if system else [])
        self.branches.append(branch)
        self.current = branch
        self.take([self.user()], "good")

    def folder_over(self, notebook, window):
        return Folder(
            notebook=notebook, soft_tokens=SOFT_TOKENS, keep_last=self.keep_last, window_tokens=window, count=count,
            summary_tokens=60,
        )  # fmt: skip

    def user(self, words=1):
        self.number += 1
        return Message(role="user", content=f"request {self.number} " * words)

    def teardown(self):
        self.notebook.close()
        self.place.cleanup()

    # -- turns

    @rule(words=st.integers(1, 30), answer=answers)
    def user_speaks(self, words, answer):
        self.take([self.user(words)], answer)

    @rule(words=st.integers(0, 30), answer=answers)
    def assistant_speaks(self, words, answer):
        self.number += 1
        self.take([Message(role="assistant", content=f"said {self.number} " * words), self.user()], answer)

    @rule(answer=answers, alone=st.booleans())
    def system_speaks(self, answer, alone):
        self.number += 1
        note = Message(role="system", content=f"note {self.number}")
        self.take([note] if alone else [note, self.user()], answer)

    @rule(words=st.integers(0, 30), answer=answers)
    def an_assistant_speaks_last(self, words, answer):
        self.number += 1
        self.take([Message(role="assistant", content=f"said {self.number} " * words)], answer)

    @rule(data=st.data(), calls=st.integers(1, 6), words=st.integers(0, 40), answer=answers)
    def tools_run(self, data, calls, words, answer):
        self.number += 1
        ids = [f"{self.number}.{place}" for place in range(calls)]
        asked = Message(role="assistant", tool_calls=tuple(ToolCall(id=i, name="t", arguments="{}") for i in ids))
        order = data.draw(st.permutations(ids))
        self.take(
            [asked, *(Message(role="tool", tool_call_id=i, content=f"result {i} " * words) for i in order)], answer
        )

    @rule(steps=st.integers(5, 25), answer=st.sampled_from(["good", "error"]))
    def many_tiny_turns(self, steps, answer):
        for _ in range(steps):
            self.number += 1
            call = ToolCall(id=f"{self.number}", name="t", arguments="{}")
            done = Message(role="tool", tool_call_id=call.id, content="1")
            self.take([Message(role="assistant", tool_calls=(call,)), done], answer)

    def take(self, messages, answer):
        """One model call: look at what is new, fold if it pays, send."""
        branch, known, before = self.current, len(self.current.messages), self.current.sent
        branch.add(messages)
        fold = self.folder.newest(branch.digests, known)
        assert fold is None  # no other branch has these messages
        proposal = self.folder.propose(
            branch.messages, branch.digests, branch.tokens, tools_tokens=self.tools_tokens, fold=branch.fold
        )
        made = self.folded(proposal, branch.sent, answer)
        if made is not None:
            replaced = sum(map(count, proposal.folded)) + (size_of(branch.fold.text) if branch.fold else 0)
            assert replaced == proposal.replaced_tokens
            before_tokens = sum(map(count, self.folder.applied(branch.fold, branch.messages)))
            after_tokens = sum(map(count, self.folder.applied(made, branch.messages)))
            assert abs(before_tokens - replaced + size_of(made.text) - after_tokens) <= 24  # marks and roundings
            self.flows.append((proposal, branch.sent, made))
            branch.fold = made
        branch.sent = self.folder.applied(branch.fold, branch.messages)
        assert made is not None or branch.sent[: len(before)] == before
        assert made is None or size_of(made.text) < proposal.replaced_tokens
        self.told[branch.digests[-1]] = branch.sent

    def folded(self, proposal, sent, answer):
        told = ANSWERS[answer]
        told = told.replace("{n}", str(self.number)) if isinstance(told, str) else told
        fold = ended(self.folder.flow(proposal, sent), told)
        assert fold is None or answer == "good"
        return fold

    # -- the past

    @rule(data=st.data())
    def resume(self, data):
        """Another process opens a checkpoint: it sees what was sent then."""
        branch = data.draw(st.sampled_from(self.branches))
        at = data.draw(st.sampled_from([i for i, digest in enumerate(branch.digests) if digest in self.told]))
        with Notebook(self.place.name) as notebook:
            folder, earlier = self.folder_over(notebook, self.window), branch.start_of(at + 1)
            prompt = folder.applied(folder.newest(earlier.digests), earlier.messages)
            assert self.told[branch.digests[at]] == prompt

    @rule(data=st.data())
    def fork(self, data):
        """Somebody goes on from an earlier point with other messages."""
        branch = data.draw(st.sampled_from(self.branches))
        at = data.draw(st.sampled_from([i for i, digest in enumerate(branch.digests) if digest in self.told]))
        other = branch.start_of(at + 1)
        other.fold = self.folder.newest(other.digests)
        other.sent = self.folder.applied(other.fold, other.messages)
        assert self.told[branch.digests[at]] == other.sent
        self.branches.append(other)
        self.current = other

    @precondition(lambda self: self.flows)
    @rule(data=st.data())
    def fold_again(self, data):
        """What a digest stands for does not change, whoever asks once more."""
        proposal, sent, fold = data.draw(st.sampled_from(self.flows))
        assert fold == ended(self.folder.flow(proposal, sent), None)

    # -- what always holds

    @invariant()
    def view_is_valid(self):
        check_view(self.current)
        self.notebook.check()


def check_view(branch):
    """Pairs whole, ids unique, requests, systems and the last messages there, in order."""
    asked, answered = [], []
    for message in branch.sent:
        asked += [call.id for call in message.tool_calls]
        if message.role == "tool":
            assert message.tool_call_id in asked
            answered.append(message.tool_call_id)
    assert len(set(asked)) == len(asked)
    assert sorted(asked) == sorted(answered)
    users = [message for message in branch.messages if message.role == "user"]
    contents = [message.content for message in branch.sent]
    assert any(content.startswith(users[0].content) for content in contents)
    assert any(content.startswith(users[-1].content) for content in contents)
    systems = [message for message in branch.messages if message.role == "system"]
    assert systems == [message for message in branch.sent if message.role == "system"]
    assert sum(SUMMARY_MARK in content for content in contents) == (branch.fold is not None)
    if branch.fold is not None:
        window = tuple(branch.messages[branch.fold.k :])
        assert window
        assert window == branch.sent[-len(window) :]
    places = {id(message): place for place, message in enumerate(branch.messages)}
    turns = [places[id(message)] for message in branch.sent if id(message) in places and message.role != "system"]
    assert sorted(set(turns)) == turns


def ended(flow, told):
    """What `flow` returns if the model says `told` to everything; with None nobody may be asked."""
    try:
        next(flow)
        while told is not None:
            flow.send(told)
    except StopIteration as end:
        return end.value
    raise AssertionError("a model was asked again")


FoldMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestFoldMachine = FoldMachine.TestCase
