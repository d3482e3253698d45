"""When a cut is proposed."""

from hypothesis import given
from hypothesis import strategies as st

from agentkv.context.cuts import Cut, propose_cut


def test_a_prompt_that_will_outgrow_the_window_is_told_with_the_calls_that_are_left() -> None:
    """1,000 tokens a call from 5,000 on: three more calls fit into 8,000."""
    cut = propose_cut([3000, 4000, 5000], window_tokens=8000, budget_left=None)
    assert cut == Cut(
        calls_left=3,
        wall="window",
        growth_tokens=1000,
        reason="prompts of 5,000 tokens grow by 1,000 a call: 3 more fit into a window of 8,000",
    )


def test_a_budget_that_ends_first_is_the_wall() -> None:
    """Two calls of 6,000 and 7,000 tokens fit into 14,000, the third does not."""
    cut = propose_cut([3000, 4000, 5000], window_tokens=100_000, budget_left=14_000)
    assert cut is not None
    assert ("budget", 2) == (cut.wall, cut.calls_left)


def test_far_from_any_wall_nothing_is_proposed() -> None:
    """Ten calls ahead everything fits."""
    assert propose_cut([3000, 4000, 5000], window_tokens=16_000, budget_left=None) is None


def test_a_fold_between_calls_is_no_growth() -> None:
    """The prompt fell once; it still grows by 1,000."""
    cut = propose_cut([5000, 6000, 2000, 3000], window_tokens=5500, budget_left=None)
    assert cut is not None
    assert (1000, 2) == (cut.growth_tokens, cut.calls_left)


@given(
    st.lists(st.integers(0, 10**7), max_size=30), st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 10**6)
)
def test_any_sizes_give_an_answer(sizes: list[int], window: int | None, budget: int | None) -> None:
    """Whatever the numbers, no exception, and a wall only where there is one."""
    cut = propose_cut(sizes, window_tokens=window, budget_left=budget)
    if cut is not None:
        assert {"window": window, "budget": budget}[cut.wall] is not None
        assert 0 <= cut.calls_left <= 9
