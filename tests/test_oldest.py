"""The oldest releases of LangGraph and LangChain: pyproject.toml, oldest.txt and oldest.sh say the same."""

from __future__ import annotations

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PINNED = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (TESTS / "oldest.txt").read_text(), re.MULTILINE))


def lower_bounds() -> set[tuple[str, str]]:
    """Each (package, lower bound) of pyproject.toml, of the base and of all extras."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    lines = [line for group in project["optional-dependencies"].values() for line in group] + project["dependencies"]
    return {match.groups() for line in lines if (match := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line))}


def same(bound: str, pinned: str) -> bool:
    """Whether a bound such as 1.2 admits nothing older than 1.2.0."""
    return bound == pinned[: len(bound)] and not pinned[len(bound) :].strip(".0")


@pytest.mark.parametrize("package", ["langgraph", "langgraph-prebuilt", "langchain"])
def test_what_is_tested_as_the_oldest_is_the_lower_bound(package) -> None:
    """In each extra that names the package."""
    bounds = {bound for name, bound in lower_bounds() if name == package}
    assert 1 <= len(bounds)
    assert {True} == {same(bound, PINNED[package]) for bound in bounds}, (bounds, PINNED[package])


def test_the_second_round_has_the_oldest_openai_client_and_model() -> None:
    """ChatOpenAI's releases that take openai 3 start at the bound."""
    second = dict(re.findall(r"([\w-]+)==([\d.]+)", (TESTS / "oldest.sh").read_text()))
    bounds = dict(lower_bounds())
    assert same(bounds["openai"], second["openai"])
    assert same(bounds["langchain-openai"], second["langchain-openai"])


@pytest.mark.skipif("AGENTKV_OLDEST" not in os.environ, reason="in tests/oldest.sh only")
def test_the_environment_holds_the_pinned_releases() -> None:
    """Nothing was upgraded on the way."""
    assert {name: version(name) for name in PINNED} == PINNED
