"""Memories that outlive a prompt: remember, recall, decide whether to inject. See docs/memory.md."""

from agentkv.context.memory.decide import Injection, Shingles, Skipped, decide
from agentkv.context.memory.embed import Embed, HashingEmbed, MeanPooled, sentence_transformer
from agentkv.context.memory.memory import KINDS, Memory, Recalled, default_path

__all__ = [
    "KINDS",
    "Embed",
    "HashingEmbed",
    "Injection",
    "MeanPooled",
    "Memory",
    "Recalled",
    "Shingles",
    "Skipped",
    "decide",
    "default_path",
    "sentence_transformer",
]
