"""Tiny models with random weights, their tokenizer, and transformers as the oracle; all built offline, in a second.

Fixture `models` (tests/conftest.py) is this module. `models.save(folder, "llama", ...)` writes a Hugging Face folder;
its switches make the odd ones of users' reports:

    template=STRICT, NO_SYSTEM, CHATML, BOS_CHATML, None    bos=True: the tokenizer puts a start token before a raw text
    vocab_size=320: padded      family="mistral", sliding_window=32      rope={"rope_type": "dynamic", "factor": 2.0}
    tie_word_embeddings=True    merges=True: tokens of several bytes, digits one by one
    fallback=True: words, and byte tokens for all else, as Llama 2's, Mistral's and Gemma's tokenizers have them

`Oracle(folder)` is transformers' eager float32 attention without a cache: `logits(ids)`, `greedy(ids, count)`.
`FAMILIES` are the families of docs/engine.md, each with the sizes of its tiny model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START, END, VOID = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
CHATML = "{% for m in messages %}" + _TURN + "{% endfor %}" + _OPENING
BOS_CHATML = "{{ bos_token }}" + CHATML
STRICT = (
    "{% set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% endfor %}" + CHATML
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}" + CHATML
)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.4,
}  # fmt: skip
WORDS = ["▁", "a", "b", "▁a", "▁hello", "▁▁", "é", "\ufffd"]
"""Of `fallback_tokenizer`, from id 259 on."""
VOCABULARY = 259
"""Ids of the tokenizer without merges: 256 bytes, then START, END, VOID."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }, "attention_bias": True}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2.5-yarn": ("qwen2", {"rope": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    }}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 32}),
    "ministral": ("ministral", {"sliding_window": 32, "layer_types": [_SLIDING, _FULL]}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 33}),
    "phi4-mini": ("phi3", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 256, "rope": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [1.5 + i for i in range(6)], "partial_rotary_factor": 0.75,
    }}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {
        "sliding_window": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    }),
    "gemma3": ("gemma3_text", {
        "sliding_window": 32, "query_pre_attn_scalar": 24, "num_hidden_layers": 3,
        "layer_types": [_SLIDING, _SLIDING, _FULL], "tie_word_embeddings": False,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }),
    "gpt-oss": ("gpt_oss", {
        "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": [_SLIDING, _FULL],
    }),
    "dynamic-rope": ("llama", {"rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "linear-rope": ("llama", {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
}  # fmt: skip
"""Name -> (model type, sizes). Sizes that a family does not know are harmless."""


def tokenizer(template: str | None = CHATML, *, bos: bool = False, merges: bool = False) -> Any:
    """One token per byte (with `merges` also some pairs) and three control tokens; START is the start token.

    `bos`: the tokenizer puts START before a raw text, as Llama's and Gemma's do.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, processors
    from tokenizers import models as kinds
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre.ByteLevel.alphabet()))}
    pairs = _pairs() if merges else []
    for one, other in pairs:
        vocab[one + other] = len(vocab)
    backend = Tokenizer(kinds.BPE(vocab=vocab, merges=pairs))
    split: Any = pre.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), split]) if merges else split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END, VOID)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", pair=f"{START} $A {START} $B", special_tokens=[(START, backend.token_to_id(START))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=END, pad_token=VOID)
    made.chat_template = template
    return made


def fallback_tokenizer(template: str | None = CHATML, *, strips: bool = True) -> Any:
    """Words and byte tokens (a byte's id is the byte), control tokens 256 to 258. `strips`: a text's first space is left
    out, as Llama 2's tokenizer does and Gemma's does not.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    named = [f"<0x{byte:02X}>" for byte in range(256)] + [START, END, VOID] + WORDS
    backend = Tokenizer(kinds.BPE(vocab={name: i for i, name in enumerate(named)}, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END, VOID)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=END, pad_token=VOID)
    made.chat_template = template
    return made


def _pairs() -> list[tuple[str, str]]:
    """Merges of a byte-level BPE ("Ġ" is a space)."""
    return [("t", "h"), ("th", "e"), ("Ġ", "t"), ("i", "n"), ("Ġ", "Ġ"), ("e", "r"), ("Ã", "©"), ("1", "2")]


def config(family: str = "llama", *, rope: dict[str, Any] | None = None, **sizes: Any) -> Any:
    """A tiny config of a model type, or of a name in FAMILIES."""
    from transformers import AutoConfig

    kind, own = FAMILIES.get(family, (family, {}))
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    wanted = {**SIZES, **tokens, **own, **sizes}
    rope = rope or wanted.pop("rope", None)
    wanted.pop("rope", None)
    if rope is not None:
        wanted["rope_parameters"] = {"rope_theta": 1e4, **rope}
    return AutoConfig.for_model(kind, **wanted)


def build(family: str = "llama", *, seed: int = 0, **sizes: Any) -> Any:
    """A model with random weights that make its choices clear; it writes printable ASCII and the end token."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(family, **sizes), dtype=torch.float32, attn_implementation="eager")
    made = made.eval()
    head = made.get_output_embeddings().weight
    sizes_of = made.config.get_text_config()
    queries_keys = (sizes_of.num_attention_heads + sizes_of.num_key_value_heads) * SIZES["head_dim"]
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):  # flat attention: every token in sight counts
                parameter.mul_(0.4)
            elif name.endswith("qkv_proj.weight"):
                parameter[:queries_keys].mul_(0.4)
        silent = [i for i, letter in enumerate(_letters()) if ord(letter) > 126]
        head[[*silent, sizes_of.bos_token_id, sizes_of.pad_token_id]] = 0
    return made


def _letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def save(
    folder: Path,
    family: str = "llama",
    *,
    template: str | None = CHATML,
    bos: bool = False,
    merges: bool = False,
    fallback: bool = False,
    seed: int = 0,
    shard_bytes: int | None = None,
    **sizes: Any,
) -> Path:
    """A Hugging Face folder with a tiny model; `shard_bytes` cuts its weights into files of that size."""
    made_tokenizer = fallback_tokenizer(template) if fallback else tokenizer(template, bos=bos, merges=merges)
    if "vocab_size" not in sizes:
        sizes["vocab_size"] = len(made_tokenizer)
    if merges:
        ids = {f"{name}_token_id": made_tokenizer.convert_tokens_to_ids(text) for name, text in _CONTROLS}
        sizes = {**ids, **sizes}
    shards = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    build(family, seed=seed, **sizes).save_pretrained(folder, **shards)
    made_tokenizer.save_pretrained(folder)
    return folder


_CONTROLS = (("bos", START), ("eos", END), ("pad", VOID))


def edit(folder: Path, name: str, **changes: Any) -> None:
    """Change fields of a JSON file in the folder; None takes a field away."""
    path = folder / name
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


class Oracle:
    """What transformers computes: eager attention, float32, no cache. `options` go to from_pretrained."""

    def __init__(self, folder: Path, **options: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
        ).eval()

    def logits(self, ids: list[int]) -> Any:
        """[len(ids), vocabulary]."""
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids: list[int], count: int, *, end: frozenset[int] = frozenset({257})) -> list[int]:
        """The likeliest continuation, an end token included; each token from a forward over everything before it."""
        out: list[int] = []
        while len(out) < count and not (out and out[-1] in end):
            out.append(int(self.logits([*ids, *out])[-1].argmax()))
        return out
