"""Drafts are copied from where the context said the same before, and become rare where it does not help."""

from hypothesis import given
from hypothesis import strategies as st

from agentkv.engine.local.drafts import Drafter


def test_what_followed_the_last_three_tokens_before_is_guessed():
    """Up to the length that is asked for."""
    ids = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
    assert [4, 5, 6, 7] == Drafter().draft(ids, 10)
    assert [4, 5] == Drafter().draft(ids, 2)
    assert [] == Drafter().draft(ids, 0)


def test_nothing_is_guessed_where_the_end_is_new():
    """Or where there is hardly any text."""
    assert [] == Drafter().draft([1, 2, 3, 4, 5], 10)
    assert [] == Drafter().draft([1, 2, 3], 10)
    assert [] == Drafter().draft([], 10)


def test_of_several_places_the_one_with_the_longest_common_past_counts():
    """Then the latest."""
    assert [50] == Drafter().draft([8, 1, 2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3], 1)
    assert [60] == Drafter().draft([8, 1, 2, 3, 50, 8, 1, 2, 3, 60, 8, 1, 2, 3], 1)


def test_a_repeated_token_is_guessed_to_go_on():
    """The place may overlap with the end itself."""
    assert [5] == Drafter().draft([5, 5, 5, 5], 10)


def test_drafts_grow_while_they_are_right():
    """Twice as long each time, up to the most."""
    ids = [*range(40), 0, 1, 2]
    drafter = Drafter(most=15)
    lengths = []
    for _ in range(4):
        lengths.append(len(drafter.draft(ids, 99)))
        drafter.taken(lengths[-1], lengths[-1])
    assert [4, 8, 15, 15] == lengths
    assert (42, 42) == (drafter.drafted, drafter.accepted)


def test_failures_make_drafts_rare():
    """After each failure in a row twice as many tokens go by, until one is right again."""
    ids = [*range(40), 0, 1, 2]
    drafter, pauses = Drafter(), []
    for _ in range(5):
        assert drafter.draft(ids, 9)
        drafter.taken(4, 0)
        pause = 0
        while not drafter.draft(ids, 9):
            pause += 1
        pauses.append(pause)
    assert [1, 2, 4, 8, 16] == pauses
    drafter.taken(2, 1)
    assert drafter.draft(ids, 9)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20), st.integers(1, 7))
def test_every_draft_stands_in_the_text_behind_its_end(ids, most, growth):
    """Whatever the text, and however it grew."""
    drafter = Drafter()
    for end in range(growth, len(ids) + 1, growth):
        draft = drafter.draft(ids[:end], most)
        spelled = ids[end - 3 : end] + draft
        assert not draft or any(ids[at : at + len(spelled)] == spelled for at in range(end - 3))
