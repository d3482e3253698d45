import random
import string

import pytest
from parcel.search import closest, distance, near_duplicates


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("", "", 0), ("lamp", "lamp", 0), ("lamp", "lamb", 1), ("lamp", "clamp", 1), ("abc", "", 3)],
)
def test_known_distances(a, b, edits):
    assert distance(a, b) == edits


def test_a_misspelt_article_is_found():
    assert closest("tabel lmap", ["table lamp", "floor lamp", "label"]) == "table lamp"


@pytest.fixture
def names():
    rng = random.Random(3)
    return ["".join(rng.choices(string.ascii_lowercase, k=11)) for _ in range(220)]


def test_a_near_duplicate_is_found_among_many(names):
    names.append(names[0][:-1] + "?")
    assert (names[0], names[-1]) in near_duplicates(names)


def test_distances_are_symmetric(names):
    assert all(distance(a, b) == distance(b, a) for a, b in zip(names, names[1:]))
