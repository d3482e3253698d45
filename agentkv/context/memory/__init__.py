"""Memories that outlive a prompt: remember, recall, decide whether to inject. See docs/memory.md."""

from agentkv.context.memory.decide import Injection, Shingles, Skipped, decide
from agentkv.context.memory.embed import Embed, HashingEmbed, MeanPooled, sentence_transformer
from agentkv.context.memory.memory import Memory, default_path
from agentkv.context.memory.recalled import KINDS, Kind, Memories, Recalled

__all__ = [
    "KINDS",
    "Embed",
    "HashingEmbed",
    "Injection",
    "Kind",
    "MeanPooled",
    "Memories",
    "Memory",
    "Recalled",
    "Shingles",
    "Skipped",
    "decide",
    "default_path",
    "sentence_transformer",
]
