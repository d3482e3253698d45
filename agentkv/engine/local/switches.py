"""Switches: variables of a chat template that a call may set, and among them how much the model thinks.

Covers which there are (what the template reads and nobody else sets), values for them, and what an effort means to a model.
A variable that the template does not read is refused, never dropped.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentkv.errors import RequestInvalid

_ON_OFF = ("enable_thinking", "thinking")
"""True or false: whether the model thinks (Qwen3 and SmolLM3; DeepSeek and Granite)."""
_EFFORT = "reasoning_effort"
"""How much, in words (GPT-OSS)."""
_FUNCTIONS = frozenset({"messages", "raise_exception", "strftime_now"})
"""What transformers gives to every template."""
_KNOWS_NONE = re.compile(r"""reasoning_effort\s*[=!]=\s*['"]none['"]""")
_MARKED_OUT = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag that transformers knows and Jinja does not; it is for training."""


class Switches:
    """Those of one model. `source`: its template; `name`: the model's; `thinks`: it may think before it answers."""

    def __init__(self, source: str, tokenizer: Any, *, name: str, thinks: bool) -> None:
        self._name, self._thinks = name, thinks
        self._source = source
        self.names = _free(source) - _FUNCTIONS - _taken(tokenizer) if source else frozenset[str]()

    def values(self, effort: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Variables for the template: `given`, and behind it what `effort` means.

        Raises RequestInvalid for a variable that the template does not read, and an effort that nothing here switches.
        """
        for name in given:
            if name not in self.names:
                read = ", ".join(sorted(self.names)) or "none that a call could set"
                raise RequestInvalid(
                    f"chat_template_kwargs names {name!r:.60}, which the template of {self._name} does not read; it reads {read}",
                    param=f"chat_template_kwargs.{name:.60}",
                    code="unsupported_value",
                )
        return self._of_effort(effort) | dict(given)

    def _of_effort(self, effort: str | None) -> dict[str, Any]:
        if effort is None:
            return {}
        graded = _EFFORT in self.names and (effort != "none" or _KNOWS_NONE.search(self._source) is not None)
        switch = next((name for name in _ON_OFF if name in self.names), None)
        if not graded and switch is None:
            if effort == "none" and not self._thinks:
                return {}
            why = "has no switch for its thinking" if self._thinks else "does not think before it answers"
            why = f"thinks with more than {effort!r}" if self._thinks and _EFFORT in self.names else why
            raise RequestInvalid(
                f"reasoning_effort={effort!r} is not supported: {self._name} {why}",
                param="reasoning_effort",
                code="unsupported_value",
            )
        told: dict[str, Any] = {} if switch is None else {switch: effort != "none"}
        return told | ({_EFFORT: effort} if graded else {})


def _free(source: str) -> frozenset[str]:
    """Names that the template looks up and does not make itself; none where it cannot be read."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        names = find_undeclared_variables(environment.parse(_MARKED_OUT.sub("", source)))
    except TemplateError:
        return frozenset()
    return frozenset(names - environment.globals.keys())


def _taken(tokenizer: Any) -> frozenset[str]:
    """Names with a meaning of their own where a template is applied, and the tokenizer's control tokens."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"}
    return frozenset(parameters) | frozenset(tokenizer.special_tokens_map)
