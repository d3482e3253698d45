"""A rule: for which outputs it is, and what it makes of them; and the order in which rules are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`matches(tool, command, text)` says whether the rule is for this output, `apply(text, budget)` shortens it.

    `text` is clean (clean.py). `budget` is a number of tokens to aim at: the Slimmer counts what comes back and asks
    again with less where that was too much. `apply` must be pure. None as its answer means "not for me after all",
    and the next rule is asked. `lossless` says that nothing is lost by it: the whole output needs no handle.
    `over_only`: an output within its bound stays as it is, and no later rule is asked.
    """

    name: str
    matches: Callable[[str, str, str], bool]
    apply: Callable[[str, int], str | None]
    lossless: bool = False
    over_only: bool = False


class SlimRules:
    """Rules in the order in which they are asked; the first that matches and has an answer decides.

    Raises ConfigError where two rules have one name.
    """

    def __init__(self, *rules: Rule) -> None:
        names = [rule.name for rule in rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two slimming rules are named {twice[0]!r}; names tell rules apart in the report")
        self._rules = rules

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    @property
    def names(self) -> tuple[str, ...]:
        """The rules' names, first asked first."""
        return tuple(rule.name for rule in self._rules)

    def first(self, *rules: Rule) -> SlimRules:
        """These rules, with `rules` asked before them."""
        return SlimRules(*rules, *self._rules)

    def without(self, *names: str) -> SlimRules:
        """These rules without those named; raises ConfigError for a name that is not there."""
        for name in names:
            if name not in self.names:
                raise ConfigError(f"no slimming rule is named {name!r}; there are {', '.join(self.names)}")
        return SlimRules(*(rule for rule in self._rules if rule.name not in names))
