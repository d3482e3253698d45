"""Folder: when a fold pays, what stays word for word, the summary call, and what becomes of a bad answer."""

import json
import subprocess
import sys

import pytest

from agentkv import log
from agentkv.context.notebook import Fold, Notebook, chain
from agentkv.context.summary import SUMMARY_MARK, Folder, Proposal, Summary, groups, is_summary
from agentkv.core.message import Message, ToolCall
from agentkv.errors import BudgetExceeded, ConfigError, PromptTooLong

SYSTEM = Message(role="system", content="be brief")
REQUEST = "fix the bug in src/a.py, line 12"
GOOD = "Goal: fix the bug\nDecisions:\n- use json\nFacts:\n- port 8080\nFiles:\n- src/a.py\nOpen items:\n- write tests"


def user(text):
    return Message(role="user", content=text)


def said(text="", *calls):
    return Message(
        role="assistant", content=text, tool_calls=tuple(ToolCall(id=c, name="t", arguments="{}") for c in calls)
    )


def result(call_id, text="result " * 20):
    return Message(role="tool", content=text, tool_call_id=call_id)


def count(message):
    return len(message.content) // 4 + 4 + sum(len(call.arguments) // 4 + 3 for call in message.tool_calls)


def loop(steps, request=REQUEST, words=20, start=0):
    messages = [] if start else [SYSTEM, user(request)]
    for i in range(start, start + steps):
        messages += [said(f"step {i}", f"c{i}"), result(f"c{i}", f"result {i} " * words)]
    return messages


def digests_of(messages):
    digests = []
    for message in messages:
        digests.append(chain(digests[-1] if digests else b"", message))
    return digests


def folder_with(soft_tokens=500, **options):
    options.setdefault("notebook", Notebook())
    options.setdefault("count", count)
    return Folder(soft_tokens=soft_tokens, **options)


def proposal_of(folder, messages, **options):
    return folder.propose(messages, digests_of(messages), [count(message) for message in messages], **options)


class Model:
    """Answers summary calls one after the other; keeps the prompts."""

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def run(flow, model):
    try:
        prompt = next(flow)
        while True:
            prompt = flow.send(model(prompt))
    except StopIteration as ended:
        return ended.value


class Agent:
    """One conversation that is folded before a call whenever the folder says so."""

    def __init__(self, folder, model, tools_tokens=0):
        self.folder, self.model, self.tools_tokens = folder, model, tools_tokens
        self.messages, self.digests, self.fold, self.sent = [], [], None, ()
        self.prompts, self.folds, self.proposals = [], [], []

    def call(self, *new):
        known = len(self.messages)
        for message in new:
            self.messages.append(message)
            self.digests.append(chain(self.digests[-1] if self.digests else b"", message))
        self.fold = self.folder.newest(self.digests, known) or self.fold
        tokens = [count(message) for message in self.messages]
        proposal = self.folder.propose(
            self.messages, self.digests, tokens, tools_tokens=self.tools_tokens, fold=self.fold
        )
        self.proposals.append(proposal)
        made = run(self.folder.flow(proposal, self.sent), self.model)
        if made is not None:
            self.fold = made
            self.folds.append(len(self.prompts))
        self.sent = self.folder.applied(self.fold, self.messages)
        self.prompts.append(self.sent)
        return self.sent

    def steps(self, number, words=20):
        turns = loop(number, words=words, start=max(1, len(self.messages)))
        if not self.messages:
            self.call(SYSTEM, user(REQUEST))
        for place in range(0, len(turns), 2):
            self.call(*turns[place : place + 2])
        return self


def assert_valid(prompt):
    """Every result has its call before it, every call its result right behind, all in whole turns."""
    asked, answered = [], []
    for message in prompt:
        asked += [call.id for call in message.tool_calls]
        if message.role == "tool":
            assert message.tool_call_id in asked
            answered.append(message.tool_call_id)
    assert sorted(asked) == sorted(answered)
    assert len(set(asked)) == len(asked)


def size(prompt):
    return sum(map(count, prompt))


# -- when


def test_below_the_mark_nothing_is_proposed():
    """And it says so with both numbers."""
    proposal = proposal_of(folder_with(10_000), loop(10))
    assert "none" == proposal.kind
    assert "588 tokens are not above the mark of 10,000" == proposal.reason


def test_above_the_mark_the_oldest_turns_are_folded_if_it_pays():
    """The reason tells the numbers: tokens now and after, saved per call, to compute again, calls to pay back."""
    messages = loop(10)
    proposal = proposal_of(folder_with(500), messages)
    assert "fold" == proposal.kind
    assert (
        "588 tokens are above the mark of 500; folding 14 messages would leave 288: 300 fewer per call for 270 to compute again, "
        "repaid in 0.9 calls (at most 4)"
    ) == proposal.reason
    assert (300, 270) == (proposal.saved_tokens, proposal.invalidated_tokens)
    assert proposal.payback_calls == pytest.approx(270 / 300)
    assert tuple(messages[2:16]) == proposal.folded
    assert digests_of(messages)[-1] == proposal.digest


def test_proposing_changes_nothing():
    """The same question has the same answer."""
    folder, messages = folder_with(500), loop(10)
    assert proposal_of(folder, messages) == proposal_of(folder, messages)


def test_tools_and_system_count_towards_the_mark():
    """S8: thirty large schemas and a short chat are above it."""
    folder, messages = folder_with(1_000), loop(10)
    assert "none" == proposal_of(folder, messages).kind
    assert "fold" == proposal_of(folder, messages, tools_tokens=600).kind
    large = [Message(role="system", content="x" * 2_400), *messages[1:]]
    assert "fold" == proposal_of(folder, large).kind


def test_the_mark_may_be_a_share_of_the_window():
    """0.5 of 8,000 is 4,000; without a window it is an error."""
    assert 4_000 == folder_with(0.5, window_tokens=8_000).soft_tokens
    with pytest.raises(ConfigError, match="window_tokens"):
        folder_with(0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_tokens": 0}, {"soft_tokens": -5}, {"soft_tokens": float("nan")}, {"keep_last": -1}, {"low_share": 0},
        {"low_share": 1.5}, {"max_payback_calls": -1}, {"fallback": "guess"}, {"reserve_tokens": -1},
        {"window_tokens": 100, "reserve_tokens": 100}, {"summary_tokens": -1},
    ],
)  # fmt: skip
def test_numbers_that_cannot_work_are_refused(options):
    """With the option's name."""
    with pytest.raises(ConfigError):
        folder_with(**options)


def test_lists_that_are_not_parallel_are_refused():
    """A wrong position would fold the wrong messages."""
    with pytest.raises(ConfigError, match="one each"):
        folder_with().propose(loop(2), [], [])


def test_what_does_not_pay_is_deferred_with_its_reason():
    """A large window behind few old turns: more to compute again than four calls save."""
    messages = [*loop(3), *loop(3, words=150, start=3)]
    folder = folder_with(1_000)
    proposal = proposal_of(folder, messages)
    assert "defer" == proposal.kind
    assert proposal.payback_calls > 4
    assert (
        "calls to repay (at most 4); deferred until it pays, the prefix breaks anyway or the window is full"
        in proposal.reason
    )
    assert run(folder.flow(proposal, messages), Model(GOOD)) is None


def test_a_first_choice_that_does_not_pay_gives_way_to_the_deepest():
    """A high low mark would fold too little for what it breaks."""
    options = {"soft_tokens": 500, "low_share": 0.95}
    gentle, strict = (proposal_of(folder_with(max_payback_calls=n, **options), loop(10)) for n in (9, 1))
    assert ("fold", "fold") == (gentle.kind, strict.kind)
    assert (16, True) == (strict.k, gentle.k < 16)


def test_what_was_deferred_is_free_when_the_prefix_breaks_anyway():
    """Nothing is computed again that would not be."""
    messages = [*loop(3), *loop(3, words=150, start=3)]
    proposal = proposal_of(folder_with(1_000), messages, breaks_anyway=True)
    assert ("fold", 0, 0.0) == (proposal.kind, proposal.invalidated_tokens, proposal.payback_calls)
    assert "free: the prefix breaks anyway" in proposal.reason


def test_tokens_that_were_never_sent_cost_nothing():
    """They are computed in either case, so they are not the fold's price."""
    messages = [*loop(3), *loop(3, words=150, start=3)]
    plain, fresh = (proposal_of(folder_with(1_000), messages, fresh_tokens=n) for n in (0, 800))
    assert plain.invalidated_tokens - 800 == fresh.invalidated_tokens
    assert ("defer", "fold") == (plain.kind, fresh.kind)


def test_a_prompt_that_does_not_fit_the_window_is_folded_whatever_it_costs():
    """A reserve for the answer and the next result counts with it."""
    messages = [*loop(3), *loop(3, words=150, start=3)]
    proposal = proposal_of(folder_with(1_000, window_tokens=1_400), messages)
    assert ("fold", True) == (proposal.kind, proposal.forced)
    assert "do not fit the window of 1,400" in proposal.reason


def test_under_that_pressure_the_last_messages_give_way_down_to_one_turn():
    """Never the last turn, and never a part of one."""
    messages = [*loop(0), *loop(4, words=150, start=1)]
    for window_tokens, kept in ((1_200, 4), (900, 2), (400, 2)):
        proposal = proposal_of(folder_with(1_000, window_tokens=window_tokens, keep_last=8), messages)
        assert ("fold", kept) == (proposal.kind, len(messages) - proposal.k)
    assert "nothing to fold" in proposal_of(folder_with(100, window_tokens=150), loop(1, words=150)).reason


def test_without_pressure_they_stay():
    """keep_last holds for a fold that merely pays."""
    assert 16 == proposal_of(folder_with(200, keep_last=6), loop(10)).k
    assert 12 == proposal_of(folder_with(200, keep_last=10), loop(10)).k


def test_folds_are_rare():
    """Hysteresis: after a fold the prompt is at half the mark, so most calls only append."""
    agent = Agent(folder_with(2_000), Model(GOOD)).steps(200)
    gaps = [b - a for a, b in zip(agent.folds, agent.folds[1:], strict=False)]
    assert min(gaps) >= 10
    assert max(map(size, agent.prompts)) <= 2_000 + 60


def test_a_prompt_whose_fixed_part_is_above_the_mark_does_not_fold_at_every_step():
    """Tools alone exceed it: each fold still has to pay for itself."""
    agent = Agent(folder_with(1_000), Model(GOOD), tools_tokens=3_000).steps(60)
    gaps = [b - a for a, b in zip(agent.folds, agent.folds[1:], strict=False)]
    assert len(agent.folds) > 1
    assert min(gaps) >= 2


def test_many_tiny_turns_are_folded_too():
    """S15: no turn is large, their sum is."""
    agent = Agent(folder_with(500), Model(GOOD))
    agent.call(SYSTEM, user(REQUEST))
    for i in range(300):
        agent.call(said("ok", f"t{i}"), result(f"t{i}", "1"))
    assert len(agent.folds) > 3
    assert max(map(size, agent.prompts)) < 600


# -- what


def test_system_and_request_stay_and_the_last_turns_follow():
    """S5: one request and sixty steps; its text is in every prompt, in the first message behind the system."""
    agent = Agent(folder_with(500), Model(GOOD)).steps(60)
    assert len(agent.folds) > 5
    for prompt in agent.prompts:
        assert SYSTEM == prompt[0]
        assert prompt[1].content.startswith(REQUEST)
        assert 1 >= sum(map(is_summary, prompt))
        assert_valid(prompt)


def test_between_folds_prompts_are_only_added_to():
    """P1: every prompt but those with a new fold begins with the one before."""
    agent = Agent(folder_with(500), Model(GOOD)).steps(60)
    for number, (before, after) in enumerate(zip(agent.prompts, agent.prompts[1:], strict=False), 1):
        assert (number in agent.folds) == (after[: len(before)] != before)


def test_the_newest_user_message_stays_word_for_word():
    """A second request that a long loop left behind; a third takes its place and the second may go."""
    folder = folder_with(500)
    agent = Agent(folder, Model(GOOD)).steps(5)
    agent.call(said("done"), user("now fix b.py"))
    agent.steps(30)
    assert user("now fix b.py") in agent.sent
    agent.call(said("done"), user("and c.py"))
    agent.steps(30)
    assert user("and c.py") in agent.sent
    assert user("now fix b.py") not in agent.sent
    assert all(any("now fix b.py" in m.content for m in p) for p in agent.model.prompts[-9:-8])


def test_system_messages_in_the_middle_stay():
    """In their order, behind the summary."""
    messages = [*loop(5), Message(role="system", content="note 1"), *loop(15, start=5)]
    folder = folder_with(500)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
    assert Message(role="system", content="note 1") in folder.applied(fold, messages)


@pytest.mark.parametrize("keep_last", range(1, 9))
def test_turns_whose_results_interleave_are_kept_or_folded_whole(keep_last):
    """S1: the window's edge falls between the results of two turns."""
    mixed = [said("a", "1", "2"), said("b", "3"), result("1"), result("3"), result("2")]
    messages = [*loop(10), *mixed]
    folder = folder_with(300, keep_last=keep_last)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
    prompt = folder.applied(fold, messages)
    assert_valid(prompt)
    assert tuple(mixed) == prompt[-5:]


def test_a_turn_of_ten_calls_stays_whole():
    """S2: keep 6 and one assistant message that made ten calls."""
    calls = [f"x{i}" for i in range(10)]
    messages = [*loop(8), said("b", *calls), *(result(c) for c in calls)]
    folder = folder_with(300, keep_last=6)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
    prompt = folder.applied(fold, messages)
    assert_valid(prompt)
    assert tuple(messages[-11:]) == prompt[-11:]


def test_folding_twice_changes_nothing_more():
    """S4: the second flow finds the first one's fold and asks nobody; no message appears twice."""
    folder, messages, model = folder_with(500), loop(10), Model(GOOD)
    proposal = proposal_of(folder, messages)
    fold = run(folder.flow(proposal, messages), model)
    assert fold == run(folder.flow(proposal, messages), model)
    assert 1 == len(model.prompts)
    assert "none" == proposal_of(folder, messages, fold=fold).kind
    prompt = folder.applied(fold, messages)
    assert len({id(message) for message in prompt}) == len(prompt)


def test_a_fold_above_the_mark_is_not_made_again_at_the_same_place():
    """What is left is above the mark: these messages are folded already."""
    folder, messages = folder_with(50), loop(10)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
    again = proposal_of(folder, messages, fold=fold)
    assert "defer" == again.kind
    assert "folded already" in again.reason


def roles(prompt):
    return [message.role for message in prompt if message.role != "system"]


def test_roles_alternate_where_they_did():
    """Templates that insist on it take a folded prompt too: the summary joins the request, or speaks between."""
    dialogue = [SYSTEM, user(REQUEST)]
    for i in range(30):
        dialogue += [said(f"answer {i} " * 20), user(f"question {i} " * 20)]
    for length in range(20, len(dialogue)):
        messages = dialogue[:length]
        folder = folder_with(300, keep_last=3)
        prompt = folder.applied(run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD)), messages)
        assert any(map(is_summary, prompt))
        assert ["user", "assistant"] * (len(roles(prompt)) // 2) + ["user"] * (len(roles(prompt)) % 2) == roles(prompt)


def test_the_summary_stands_behind_the_request_in_its_message():
    """Where an assistant turn follows."""
    folder, messages = folder_with(500), loop(10)
    prompt = folder.applied(run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD)), messages)
    assert f"{REQUEST}\n\n{SUMMARY_MARK}{GOOD}" == prompt[1].content
    assert 8 == len(prompt)


def test_a_system_message_between_does_not_hide_who_speaks_next():
    """A pinned note, then a user: the summary is an assistant's, so that no two user messages meet."""
    turns = [said("a" * 2_000), Message(role="system", content="note"), user("next"), said("b"), user("and?")]
    folder, messages = folder_with(300, keep_last=3), [SYSTEM, user(REQUEST), *turns]
    prompt = folder.applied(run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD)), messages)
    assert ["user", "assistant", "user", "assistant", "user"] == roles(prompt)
    assert SUMMARY_MARK + GOOD == prompt[2].content


def test_a_system_message_alone_is_no_turn_to_leave_behind():
    """Who speaks behind the summary must be known, or the next message would change the summary's form."""
    messages = [*loop(8), Message(role="system", content="note")]
    folder = folder_with(100, keep_last=0)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
    assert 16 == fold.k
    before = folder.applied(fold, messages)
    assert before == folder.applied(fold, [*messages, user("next")])[:-1]


def test_without_a_request_the_summary_is_a_message_of_its_own():
    """An agent that starts by itself."""
    messages = loop(10)[2:]
    folder = folder_with(300)
    prompt = folder.applied(run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD)), messages)
    assert user(SUMMARY_MARK + GOOD) == prompt[0]


# -- the summary call


def test_the_summary_call_is_the_last_prompt_and_one_instruction():
    """S11: byte for byte, so that it is cached."""
    agent = Agent(folder_with(500), Model(GOOD)).steps(40)
    assert len(agent.folds) == len(agent.model.prompts)
    for at, prompt in zip(agent.folds, agent.model.prompts, strict=True):
        assert agent.prompts[at - 1] == prompt[:-1]
        assert "user" == prompt[-1].role
    assert 1 == len({prompt[-1] for prompt in agent.model.prompts})


def test_an_open_call_at_its_end_is_left_out():
    """An instruction behind a call without a result is invalid; what stays is still a prefix."""
    folder, messages = folder_with(500), loop(10)
    for tail in ([said("wait", "open")], [said("two", "o1", "o2"), result("o1")]):
        model = Model(GOOD)
        run(folder_with(500).flow(proposal_of(folder, messages), [*messages, *tail]), model)
        assert tuple(messages) == model.prompts[0][:-1]


def test_the_redactor_sees_everything_that_goes_out():
    """S10: contents and arguments, also of the retry and of chunks."""
    secret = Message(role="assistant", tool_calls=(ToolCall(id="s", name="t", arguments='{"key": "sk-123"}'),))
    messages = [*loop(3), secret, result("s", "sk-123 accepted"), *loop(10, start=3)]
    for sent, window in ((messages, None), ((), 1_000)):
        model = Model("no", GOOD)
        folder = folder_with(300, redact=lambda text: text.replace("sk-123", "[key]"), summary_window_tokens=window)
        assert run(folder.flow(proposal_of(folder, messages), sent), model) is not None
        assert "sk-123" not in repr(model.prompts)
        assert "[key] accepted" in repr(model.prompts)


def test_a_redactor_that_fails_stops_the_call():
    """Nothing leaves; the history stays."""

    def broken(_text):
        raise ValueError("no rule")

    model, messages = Model(GOOD), loop(10)
    folder = folder_with(redact=broken)
    assert run(folder.flow(proposal_of(folder, messages), messages), model) is None
    assert [] == model.prompts


def test_what_a_weak_model_leaves_out_is_filled_only_if_a_fallback_is_set():
    """Its goal and facts count; files come from the turns."""
    messages = [*loop(4), said("see lib/x.py", "f"), result("f", "ok"), *loop(10, start=4)]
    for fallback, files in ((None, ()), ("extract", ("lib/x.py",))):
        folder = folder_with(500, fallback=fallback)
        fold = run(folder.flow(proposal_of(folder, messages), messages), Model("Goal: g\nFacts:\n- 1"))
        told = Summary.parse(fold.text)
        assert ("g", ("1",), files) == (told.goal, told.facts, told.files)


BAD = [
    RuntimeError("no model"), TimeoutError(), "", "  \n", None, 7, "I'm sorry, I can't do that.", "Error: 500 overloaded",
    "Previous conversation was too long to summarize", "Facts:\n" + "- a fact that is long\n" * 500, "Goal: none\nFacts:\n- ...",
]  # fmt: skip


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_answer_is_asked_for_once_more_and_then_history_stays(answer):
    """S7: with a shorter instruction; counted, nothing recorded, and the next turn may try again."""
    notebook, messages, model = Notebook(), loop(12), Model(answer)
    folder = folder_with(500, notebook=notebook)
    before = log.counters["summary_failed"]
    assert run(folder.flow(proposal_of(folder, messages), messages), model) is None
    assert 2 == len(model.prompts)
    assert len(model.prompts[1][-1].content) < len(model.prompts[0][-1].content)
    assert before + 2 == log.counters["summary_failed"]
    assert (0, None) == (len(notebook), folder.newest(digests_of(messages)))
    assert run(folder.flow(proposal_of(folder, messages), messages), Model(answer, GOOD)) is not None


@pytest.mark.parametrize("answer", BAD)
def test_with_the_fallback_the_extract_stands_in(answer):
    """Deterministic, and never the bad text."""
    folder, messages = folder_with(500, fallback="extract"), loop(12)
    fold = run(folder.flow(proposal_of(folder, messages), messages), Model(answer))
    assert Summary.parse(fold.text).goal == REQUEST
    assert "step 0" in fold.text
    assert fold == folder.extracted(proposal_of(folder, messages))


def test_a_budget_that_refuses_is_not_asked_again():
    """S7: the second call would meet the same answer."""
    refused = BudgetExceeded("no", task="t", limit="tokens", allowed=1, used=1, asked=1)
    model, messages, folder = Model(refused), loop(10), folder_with()
    assert run(folder.flow(proposal_of(folder, messages), messages), model) is None
    assert 1 == len(model.prompts)


def test_an_interrupt_passes_through():
    """KeyboardInterrupt and a cancelled task are no failed summaries."""
    messages, folder = loop(10), folder_with()
    with pytest.raises(KeyboardInterrupt):
        run(folder.flow(proposal_of(folder, messages), messages), Model(KeyboardInterrupt()))


def test_a_summariser_with_a_small_window_gets_chunks():
    """S13, S6: every prompt fits it, every turn is in one of them, in order, and all that they said is merged."""
    messages = loop(200)
    folder = folder_with(2_000, window_tokens=20_000, summary_window_tokens=1_500, summary_tokens=300)
    proposal = proposal_of(folder, messages)

    class Copying:
        def __init__(self):
            self.prompts = []

        def __call__(self, prompt):
            self.prompts.append(prompt)
            return f"Facts:\n- part {len(self.prompts)}\nFiles:\n- p/f{len(self.prompts)}.py"

    model = Copying()
    fold = run(folder.flow(proposal, messages), model)
    assert len(model.prompts) > 3
    assert all(size(prompt) + 300 <= 1_500 for prompt in model.prompts)
    told = "\n".join(prompt[0].content for prompt in model.prompts)
    places = [told.index(f"step {i}\n") for i in range(proposal.k // 2 - 1)]
    assert sorted(places) == places
    assert all(REQUEST in prompt[0].content for prompt in model.prompts)
    assert all(f"part {n}" in fold.text for n in range(1, len(model.prompts) + 1))


def test_one_retry_is_all_that_a_fold_gets():
    """The second bad answer ends it, in whatever chunk."""
    messages, model = loop(200), Model("no", GOOD, "no", GOOD)
    folder = folder_with(2_000, summary_window_tokens=1_500)
    assert run(folder.flow(proposal_of(folder, messages), ()), model) is None
    assert 3 == len(model.prompts)


def test_a_prompt_that_the_model_calls_too_long_goes_in_chunks():
    """Its error tells its window."""
    messages, model = loop(200), Model(PromptTooLong("too long", needed_tokens=9_000, limit_tokens=1_500), GOOD)
    folder = folder_with(2_000)
    assert run(folder.flow(proposal_of(folder, messages), messages), model) is not None
    assert len(model.prompts) > 3
    assert all(1 == len(prompt) for prompt in model.prompts[1:])


@pytest.mark.parametrize("text", ["x" * 100_000, "日" * 30_000, "\U0001f600" * 10_000])
def test_one_huge_message_is_cut_into_chunks_too(text):
    """A result larger than the summariser's window, in any script."""
    messages = [SYSTEM, user(REQUEST), said("", "h"), result("h", text), *loop(5, start=1)]

    def by_bytes(message):
        return len(message.content.encode()) // 3 + 4

    folder = folder_with(2_000, window_tokens=300_000, summary_window_tokens=2_500, count=by_bytes)
    proposal = folder.propose(messages, digests_of(messages), list(map(by_bytes, messages)))
    model = Model(GOOD)
    assert run(folder.flow(proposal, ()), model) is not None
    assert all(sum(map(by_bytes, prompt)) + 256 <= 2_500 for prompt in model.prompts)


def test_tools_take_their_part_of_the_summarisers_window():
    """The prompt alone would fit, with its schemas it does not."""
    messages = loop(20)
    for tools_tokens, prompt_messages in ((0, 43), (900, 1)):
        folder, model = folder_with(1_000, summary_window_tokens=2_000), Model(GOOD)
        run(folder.flow(proposal_of(folder, messages, tools_tokens=tools_tokens), messages), model)
        assert prompt_messages == len(model.prompts[0])


def test_hundreds_of_chunks_are_refused_before_the_first():
    """One summary does not cost a hundred calls."""
    messages, model = [SYSTEM, user(REQUEST), said("", "h"), result("h", "x" * 400_000), *loop(5, start=1)], Model(GOOD)
    folder = folder_with(2_000, summary_window_tokens=1_000)
    assert run(folder.flow(proposal_of(folder, messages), ()), model) is None
    assert [] == model.prompts


def test_an_extract_longer_than_what_it_replaces_is_no_fold():
    """Tiny turns behind a long request: nothing would be saved."""
    messages = [SYSTEM, user("long request " * 300)]
    for i in range(12):
        messages += [said("", f"t{i}"), result(f"t{i}", "1")]
    folder = folder_with(500)
    proposal = proposal_of(folder, messages, breaks_anyway=True)
    assert "fold" == proposal.kind
    assert folder.extracted(proposal) is None


def test_a_window_too_small_for_anything_leaves_history_or_extracts():
    """Never a placeholder."""
    messages = loop(50)
    for fallback in (None, "extract"):
        folder = folder_with(500, summary_window_tokens=300, fallback=fallback)
        fold = run(folder.flow(proposal_of(folder, messages), messages), Model(GOOD))
        assert (fallback is None) == (fold is None)


# -- again and again


class CopyingModel:
    """Says the sections of the summary in the prompt again and adds the steps it sees."""

    def __init__(self):
        self.prompts = []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        known = next((m.content.split(SUMMARY_MARK)[1] for m in prompt if is_summary(m)), "")
        first = "Facts:\n- invoice total 4711.50\nDecisions:\n- use port 5433\nFiles:\n- db/v2.sql\nOpen items:\n- rotate the key"
        old = Summary.parse(known or first)
        return old.merged(Summary(facts=(f"fold {len(self.prompts)}",), files=(f"f/{len(self.prompts)}.py",))).text()


@pytest.mark.parametrize("model", [CopyingModel, lambda: Model(GOOD), lambda: Model(RuntimeError())])
def test_facts_of_the_first_turn_are_there_after_five_folds(model):
    """S14: whether the model copies, forgets, or fails and the extract stands in; and the summary stays small."""
    agent = Agent(folder_with(700, fallback="extract"), model())
    agent.call(SYSTEM, user("go"))
    agent.call(
        said("I decided to use port 5433. Still to do: rotate the key.", "p"),
        result("p", "invoice total 4711.50\nwrote db/v2.sql"),
    )
    first = agent.model
    if isinstance(first, Model) and first.answers == [GOOD]:
        first.answers = [
            "Facts:\n- invoice total 4711.50\nDecisions:\n- use port 5433\nFiles:\n- db/v2.sql\nOpen items:\n- rotate the key",
            GOOD,
        ]
    agent.steps(120)
    assert len(agent.folds) >= 5
    text = "\n".join(message.content for message in agent.sent)
    for fact in ("4711.50", "port 5433", "db/v2.sql", "rotate the key"):
        assert fact in text
    assert count(user(agent.fold.text)) <= 256
    assert max(map(size, agent.prompts)) < 900


def test_a_summary_of_other_make_is_carried_on_as_facts():
    """A fold whose text is no structured summary (recorded by another program) is not lost."""
    folder, messages = folder_with(500), loop(30)
    digests = digests_of(messages)
    old = folder.record(Fold(digest=b"", k=4, text="the port is 5433", pinned=(0, 1)), digests[9])
    fold = run(folder.flow(proposal_of(folder, messages, fold=old), messages), Model(GOOD))
    assert "the port is 5433" in fold.text


def test_a_fold_that_would_leave_nothing_behind_it_is_not_found():
    """It was not made for this conversation; the prompt would end in the summary."""
    folder, messages = folder_with(500), loop(5)
    digests = digests_of(messages)
    folder.record(Fold(digest=b"", k=len(messages), text=GOOD), digests[-1])
    assert folder.newest(digests) is None


def test_a_summary_written_while_a_tool_runs_takes_effect_when_it_is_recorded():
    """Not before: the prompt that was sent meanwhile stays what it was on a resume."""
    folder, messages = folder_with(500), loop(11)
    earlier, digests = messages[:-2], digests_of(messages)
    made = run(folder.flow(proposal_of(folder, earlier), earlier, record=False), Model(GOOD))
    assert folder.newest(digests) is None
    assert made.k == folder.record(made, digests[-1]).k
    assert folder.newest(digests[:-2]) is None
    assert folder.newest(digests).digest == digests[-1]


def test_a_resume_from_an_earlier_checkpoint_finds_the_fold_that_held_then():
    """S16: every prompt of the run comes again byte for byte from its messages alone."""
    agent = Agent(folder_with(500), Model(GOOD)).steps(60)
    assert len(agent.folds) > 5
    for number, prompt in enumerate(agent.prompts):
        messages = agent.messages[: 2 + 2 * number]
        fold = agent.folder.newest(digests_of(messages))
        assert prompt == agent.folder.applied(fold, messages)


def test_another_process_gives_the_same_bytes(tmp_path):
    """S16: through the notebook's files."""
    with Notebook(tmp_path) as notebook:
        agent = Agent(folder_with(500, notebook=notebook), Model(GOOD)).steps(40)
    program = f"""
import json, sys
from agentkv.context.notebook import Notebook, chain
from agentkv.context.summary import Folder
from agentkv.core.message import Message, ToolCall
messages = [
    Message(role=r, content=c, tool_call_id=i, tool_calls=tuple(ToolCall(id=x, name=n, arguments=a) for x, n, a in calls))
    for r, c, i, calls in json.load(sys.stdin)
]
digests = []
for message in messages:
    digests.append(chain(digests[-1] if digests else b"", message))
with Notebook({str(tmp_path)!r}) as notebook:
    folder = Folder(notebook=notebook, soft_tokens=500, count=lambda message: 1)
    print(repr(folder.applied(folder.newest(digests), messages)))
"""
    state = [
        [m.role, m.content, m.tool_call_id, [[c.id, c.name, c.arguments] for c in m.tool_calls]] for m in agent.messages
    ]
    told = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(state), capture_output=True, text=True, check=True, timeout=60
    )
    assert repr(agent.sent) == told.stdout.strip()


def test_a_flow_without_a_fold_asks_nobody():
    """None and deferred proposals end at once."""
    model = Model(GOOD)
    for kind in ("none", "defer"):
        assert run(folder_with().flow(Proposal(kind=kind, reason=""), ()), model) is None
        assert folder_with().extracted(Proposal(kind=kind, reason="")) is None
    assert [] == model.prompts


def test_turns_are_whole_groups():
    """A user message is a turn, an assistant message with its results is one."""
    assert [1, 1, 2, 2] == [len(group) for group in groups(loop(2))]
