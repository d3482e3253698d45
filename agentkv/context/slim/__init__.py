"""A tool's output made smaller once, when it arrives: rules by tool and by what the text looks like.

`Slimmer` applies them; `SlimRules` is the order in which they are asked; `Rule` is what users write. Each kind of output
has a module of its own; `rules.py` puts them in order. Whole outputs are kept by `agentkv.context.outputs`.
"""

from __future__ import annotations

from agentkv.context.slim.rule import Rule, SlimRules
from agentkv.context.slim.rules import default_rules
from agentkv.context.slim.slimmer import MAX_TOKENS, Slimmed, Slimmer

__all__ = ["MAX_TOKENS", "Rule", "SlimRules", "Slimmed", "Slimmer", "default_rules"]
