"""Tiny models with random weights and a byte tokenizer, built offline, and engines over them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentkv.core.residency import Action, Move, Outcome, Receipt, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel, load_model

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
START, END, VOID = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.4,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build_tokenizer(template: str | None = CHATML) -> Any:
    """One token per byte, three control tokens, no merges."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END, VOID)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=VOID)
    tokenizer.chat_template = template
    return tokenizer


def build_model(family: str = "llama", *, seed: int = 0, **sizes: Any) -> Any:
    """A model with random weights, large enough to make its choices clear."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    tokens = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    config = AutoConfig.for_model(family, **{**SIZES, **tokens, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # it writes printable ASCII and the end token, so that its text has one spelling only
        model.lm_head.weight[[i for i, letter in enumerate(LETTERS) if ord(letter) > 126] + [256, 258]] = 0
    return model


def save(folder: Path, family: str = "llama", *, template: str | None = CHATML, seed: int = 0, **sizes: Any) -> Path:
    """A Hugging Face folder with a tiny model."""
    build_model(family, seed=seed, **sizes).save_pretrained(folder)
    build_tokenizer(template).save_pretrained(folder)
    return folder


class Tiny:
    """A loaded tiny model and the oracle: transformers' own greedy generation, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.loaded: LoadedModel = load_model(str(folder), device="cpu", dtype="float32")
        self._oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = self.loaded.tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def greedy(self, prompt: str, count: int) -> list[int]:
        """What transformers generates, end token included."""
        ids = torch.tensor([self.ids(prompt)])
        with torch.inference_mode():
            out = self._oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=258
            )
        return out[0, ids.shape[1] :].tolist()

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def block_bytes(self, blocks: int) -> int:
        """Bytes of so many blocks."""
        return blocks * self.loaded.geometry.block_bytes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A Llama with grouped heads."""
    return Tiny(save(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session", params=["llama", "qwen3", "mha"])
def any_tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Llama with grouped heads, Qwen3 (normed queries and keys), Llama with as many KV heads as heads."""
    kind = request.param
    sizes = {"num_key_value_heads": 4} if kind == "mha" else {}
    return Tiny(save(tmp_path_factory.mktemp(kind), "llama" if kind == "mha" else kind, **sizes))


@pytest.fixture(scope="session")
def save_tiny() -> Callable[..., Path]:
    """`save` for tests that want a folder of their own."""
    return save


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """`build_tokenizer` for tests that need no model."""
    return build_tokenizer


@pytest.fixture
def start(tiny: Tiny) -> Iterator[Callable[..., LocalEngine]]:
    """Engines with sizes in blocks, closed (and their tiers checked) after the test."""
    engines: list[LocalEngine] = []

    def make(*, blocks: int = 64, host: int = 64, model: Tiny = tiny, **options: Any) -> LocalEngine:
        sizes = {"device_memory": model.block_bytes(blocks), "host_memory": _arena(model, host)}
        engine = LocalEngine(model.loaded, **{**sizes, **options})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.tiers.check()
        engine.close()


def _arena(model: Tiny, blocks: int) -> int:
    return blocks * model.loaded.geometry.slot_bytes


_numbers = itertools.count()


@pytest.fixture(scope="session")
def ask() -> Callable[..., Request]:
    """A raw prompt for a task (by default one of its own)."""

    def make(prompt: str, count: int | None = 16, *, task: str | None = None, **more: Any) -> Request:
        sampling = more.pop("sampling", None) or Sampling(max_tokens=count)
        caller = Caller(task=task or f"task-{next(_numbers)}", branch=more.pop("branch", ""))
        return Request(prompt=prompt, sampling=sampling, caller=caller, **more)

    return make


def park_session(engine: LocalEngine, session: str, to: Tier = Tier.HOST) -> None:
    """Send an idle session down to `to`, give its dearer copies up and poison every free device block: whatever is
    read from here on is a loaded copy. Needs room for all of it in the tiers that it goes through.
    """
    done = threading.Event()
    receipts: list[Receipt] = []

    def ended(receipt: Receipt) -> None:
        receipts.append(receipt)
        done.set()

    engine.apply(Move(session=session, action=Action.DEMOTE, to=to, reason="test"), ended)
    assert done.wait(20)
    assert receipts[0].outcome in {Outcome.DONE, Outcome.NOTHING}, receipts[0].detail
    engine.tiers.quiesce(20)
    for tier in range(to):
        engine.tiers.vacate(session, Tier(tier))
    poison_free(engine)
    facts = engine.residency(session)
    assert facts is not None
    assert (0, 0) == (facts.device_blocks, facts.missing_blocks)
    assert to != Tier.DISK or facts.host_blocks == 0


def poison_free(engine: LocalEngine) -> None:
    """NaN in every device block that nobody has."""
    free = engine.tiers.allocate(engine.tiers.stats()["device"]["free"])
    assert free is not None
    engine.tiers.pool[free] = float("nan")
    engine.tiers.release("-", free, used=engine.tiers.streams.record())


@pytest.fixture(scope="session")
def park() -> Callable[..., None]:
    """`park_session`."""
    return park_session


@pytest.fixture(scope="session")
def flip() -> Callable[..., None]:
    """Turns one bit of a file: `flip(path, at)`."""

    def turn(path: Path, at: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))

    return turn


@pytest.fixture(scope="session")
def slots_on_disk() -> Callable[[LocalEngine, Path], list[tuple[Path, int]]]:
    """(file, offset) of every disk slot below a folder that holds something, in the order of the files."""

    def find(engine: LocalEngine, folder: Path) -> list[tuple[Path, int]]:
        size = engine.tiers.geometry.slot_bytes
        found = []
        for path in sorted(folder.rglob("segment-*")):
            data = path.read_bytes()
            found += [(path, at) for at in range(0, len(data), size) if any(data[at : at + 64])]
        return found

    return find
