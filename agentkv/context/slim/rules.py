"""The rules that come with the package, in the order in which they are asked."""

from __future__ import annotations

from agentkv.context.slim import jsons, logs
from agentkv.context.slim.jsontext import looks_like_json
from agentkv.context.slim.rule import Rule, SlimRules
from agentkv.context.slim.verbatim import outline, verbatim


def default_rules() -> SlimRules:
    """The built-in rules. The last one matches every text."""
    return SlimRules(
        Rule(name="file", matches=lambda tool, command, _text: verbatim(tool, command), apply=outline, over_only=True),
        Rule(
            name="json", matches=lambda _tool, _command, text: looks_like_json(text), apply=jsons.thin, over_only=True
        ),
        Rule(name="log", matches=lambda _tool, _command, _text: True, apply=logs.log, over_only=True),
    )
