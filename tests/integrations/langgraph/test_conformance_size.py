"""How large the matrix is, and how much of it is let off: so that nobody makes it pass by making it small."""

from __future__ import annotations

from typing import Any

import pytest
import test_conformance_attach
import test_conformance_outcomes
import test_conformance_savers
import test_conformance_signatures
import test_conformance_streams

PARTS = (
    test_conformance_attach,
    test_conformance_outcomes,
    test_conformance_savers,
    test_conformance_signatures,
    test_conformance_streams,
)
LET_OFF = {"skip", "skipif", "xfail"}


def cells() -> list[tuple[str, set[str]]]:
    """Every case of the tests that compare a decorated graph with the plain one, and its marks."""
    found = []
    for part in PARTS:
        for name, test in vars(part).items():
            marks = getattr(test, "pytestmark", []) if name.startswith("test_") and callable(test) else []
            of_test = {mark.name for mark in marks}
            cases: list[tuple[str, set[str]]] = [(name, of_test)]
            for mark in marks:
                if mark.name == "parametrize":
                    cases = [
                        (f"{known}-{_name(value)}", marked | _marks(value))
                        for known, marked in cases
                        for value in mark.args[1]
                    ]
            if marks:
                found += [(f"{part.__name__}::{case}", marked) for case, marked in cases]
    return found


def _name(value: Any) -> str:
    return str(getattr(value, "id", None) or value)


def _marks(value: Any) -> set[str]:
    return {mark.name for mark in getattr(value, "marks", ())}


def test_the_matrix_has_at_least_500_cells_and_at_most_5_are_expected_to_fail() -> None:
    """Those that a plain `make test` runs count apart from the slow ones: they are enough by themselves."""
    every = cells()
    assert len(every) == len({name for name, _ in every})
    let_off = [name for name, marks in every if marks & LET_OFF]
    assert len(let_off) <= 5, let_off
    assert len(every) >= 500
    assert len([name for name, marks in every if "slow" not in marks]) >= 500


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_the_matrix_is_let_off_as_a_whole(part) -> None:
    """By a mark on its module."""
    marks = getattr(part, "pytestmark", [])
    assert not {mark.name for mark in (marks if isinstance(marks, list) else [marks])} & LET_OFF
