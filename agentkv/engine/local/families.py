"""Response templates for model families whose tokenizers bring none: how each writes calls and hidden thoughts.

Covers: finding the family by the marks in its chat template, and the template for transformers' own response parser.
Does not cover: parsing (`responses.py`). Checkpoints of 2026 bring a template of their own, which goes first; Hermes' and
Qwen's <tool_call> tags are read without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NEVER = "\ufdd1"
"""A start anchor that no prompt holds: in these families nothing of the assistant's turn stands in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`template` is transformers' response template. `always`: text without tools needs it too. `bare`: a call has no
    mark of its own, so only one of a known tool is one.
    """

    name: str
    template: dict[str, Any]
    always: bool = False
    bare: bool = False


def _fields(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor": _NEVER, "fields": fields}


_MISTRAL = Family(
    name="mistral",
    template=_fields(
        content={"close": "</s>"}, tool_calls={"open": "[TOOL_CALLS]", "close": "</s>", "content": "json"}
    ),
)
_MISTRAL_ARGS = Family(
    name="mistral with [ARGS]",
    template=_fields(
        content={"close": "</s>"},
        tool_calls={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            "close_pattern": r"</s>|(?=\[TOOL_CALLS\])",
            "content": "json",
            "repeats": True,
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
    ),
)
_PHI = Family(
    name="phi-4",
    template=_fields(
        content={"close": "<|end|>"},
        tool_calls={"open": "<|tool_call|>", "close": "<|/tool_call|>", "content": "json"},
    ),
)
_LLAMA = Family(
    name="llama-3",
    bare=True,
    template=_fields(
        content={"close_pattern": r"<\|(?:eot|eom)_id\|>"},
        tool_calls={
            "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*\"(?:type|name|function)\")",
            "close_pattern": r"<\|(?:eot|eom)_id\|>",
            "content": "json",
        },
    ),
)
_HARMONY = Family(
    name="gpt-oss",
    always=True,
    template=_fields(
        reasoning={
            "open_pattern": r"<\|channel\|>analysis[^<]*<\|message\|>", "close": ["<|end|>", "<|return|>"], "repeats": True,
            "join": "\n",
        },
        tool_calls={
            "open_pattern": r"(?:to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>(?:commentary|analysis)"
            r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+))"
            r"[^<]*(?:<\|constrain\|>\w+)?\s*<\|message\|>",
            "close": ["<|call|>", "<|end|>"],
            "content": "json",
            "repeats": True,
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        content={
            "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|end|>", "<|return|>"], "repeats": True, "join": "\n", "content_args": {"strip": False},
        },
    ),
)  # fmt: skip
_MARKS = (
    ("<|channel|>", _HARMONY),
    ("[ARGS]", _MISTRAL_ARGS),
    ("[TOOL_CALLS]", _MISTRAL),
    ("<|tool_call|>", _PHI),
    ("<|python_tag|>", _LLAMA),
    ("Environment: ipython", _LLAMA),
)


def family_of(chat_template: str) -> Family | None:
    """The family whose marks stand in this chat template; None where <tool_call> tags or nothing is to be expected."""
    return next((family for mark, family in _MARKS if mark in chat_template), None)
