"""Building parts from options in words: the local engine (cheap checks first, then the model), policy, planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv import log
from agentkv.clock import Clock
from agentkv.core.residency import Policy, Receipt
from agentkv.core.task import Caller
from agentkv.engine.base import Engine, TieredEngine
from agentkv.errors import AgentKVError, ConfigError, ExtraMissing
from agentkv.hints.features import command_words
from agentkv.hints.forecaster import Forecaster
from agentkv.policy.evict import next_use
from agentkv.policy.rules import Rules
from agentkv.runtime.learned import data_folder
from agentkv.runtime.planner import Planner
from agentkv.units import GIB, parse_bytes

if TYPE_CHECKING:
    from agentkv.budget.prices import PriceTable
    from agentkv.context.options import Context
    from agentkv.context.outputs import Outputs
    from agentkv.context.view import Stages
    from agentkv.runtime.books import Books


def local_engine(
    model: str,
    *,
    device: str,
    device_memory: int | str,
    host_memory: int | str | None,
    disk: str | Path | None,
    disk_memory: int | str,
    dtype: str,
    chat_template: str | Path | None,
    salt: str,
    persist: bool,
    progress: Callable[[str], None] | None,
) -> TieredEngine:
    """The embedded engine; see `AgentKV.local` for the options and errors. It starts from the rates that were measured
    for this model on this machine, if any were, and gives back what it saw when it closes.
    """
    from agentkv.kv.limits import default_host_bytes

    device_bytes = _tier_bytes(device_memory, "device_memory")
    host_bytes = (
        0
        if host_memory is None
        else default_host_bytes(GIB)
        if host_memory == "auto"
        else _tier_bytes(host_memory, "host_memory")
    )
    if persist and disk is None:
        from agentkv.kv.store import default_root

        disk = default_root()
    disk_bytes = 0 if disk is None else _tier_bytes(disk_memory, "disk_memory")
    if disk is not None and host_bytes == 0:
        raise ConfigError("disk needs the host tier, through which its blocks travel; give host_memory")
    try:
        from agentkv.engine.local.engine import LocalEngine
        from agentkv.engine.local.loader import load_model
    except ImportError as error:
        raise ExtraMissing(
            f"the embedded engine needs {error.name or 'torch'}: pip install 'agentkv-sdk[local]'"
        ) from error
    from agentkv.engine.local.several import LocalEngines
    from agentkv.runtime.calibration import RateBook

    devices = [name.strip() for name in device.split(",")]
    loaded = [
        load_model(model, device=name, dtype=dtype, chat_template=chat_template, progress=progress) for name in devices
    ]
    folder = None if disk is None else Path(disk)
    book = RateBook(loaded[0], folder)
    options: dict[str, Any] = {
        "device_memory": device_bytes, "host_memory": host_bytes, "disk": folder, "disk_memory": disk_bytes,
        "salt": salt, "persist": persist, "rates": book.rates, "at_close": book.learn,
    }  # fmt: skip
    return LocalEngine(loaded[0], **options) if len(loaded) == 1 else LocalEngines(loaded, **options)


def _tier_bytes(size: int | str, option: str) -> int:
    size_bytes = parse_bytes(size, option=option)
    if size_bytes == 0:
        off = "" if option == "device_memory" else ", or None to switch the tier off"
        raise ConfigError(f'{option}={size!r} holds no block; give a size such as "256MiB"{off}')
    return size_bytes


def rules_of(policy: str | Policy | Rules) -> Rules:
    """The rules of a name, of a plain policy, or as they are. ConfigError for a name that the runtime cannot run."""
    if isinstance(policy, Rules):
        return policy
    if not isinstance(policy, str):
        return Rules(name="custom", decide=policy, evict_key=next_use)
    from agentkv.policy import OURS, make_rules

    if policy not in OURS:
        raise ConfigError(f"policy={policy!r} is unknown; there are {', '.join(OURS)}")
    return make_rules(policy)


def planner_for(
    engine: Engine, rules: Rules, forecaster: Forecaster, clock: Clock, on_receipt: Callable[[Receipt], None]
) -> Planner | None:
    """A planner for an engine whose KV can be moved, which is told who gives way; None for others."""
    if not hasattr(engine, "residency"):
        return None
    if hasattr(engine, "rank_by"):
        engine.rank_by(rules.evict_key)
    return Planner(engine=engine, policy=rules.decide, forecaster=forecaster, clock=clock, on_receipt=on_receipt)  # type: ignore[arg-type]


def books_for(engine: Engine, *, ledger: str | None, clock: Clock, prices: str | Path | PriceTable | None) -> Books:
    """The books over the ledger that was named; what an engine with tiers of its own computes is self-hosted."""
    from agentkv.budget.prices import PriceTable, load_prices
    from agentkv.budget.store import open_ledger
    from agentkv.runtime.books import Books

    table = prices if isinstance(prices, PriceTable) else load_prices(prices)
    return Books(
        ledger=open_ledger(ledger),
        clock=clock,
        model=engine.model,
        prices=table,
        self_hosted=hasattr(engine, "residency"),
    )


def stages_for(engine: Engine, options: Context | None, *, in_memory: bool, salt: str = "") -> Stages | None:
    """The stages that every prompt passes; None where prompts are left alone. `in_memory`: no files are written.

    A tenant with a `salt` has a folder of its own, so that equal task keys of two tenants never meet.
    """
    if options is None:
        return None
    from agentkv.context.options import Context

    if not isinstance(options, Context):
        raise ConfigError(
            f"context={options!r}: say context=Context(...), or context=None to leave prompts as they are"
        )
    import hashlib

    from agentkv.context.counter import Counter
    from agentkv.context.notebook import Notebook
    from agentkv.context.slim import Slimmer
    from agentkv.context.summary import Folder
    from agentkv.context.tokens import count_text
    from agentkv.context.view import Stages

    count: Callable[[str], int] = getattr(engine, "count_text", None) or partial(count_text, model=engine.model)
    counter = Counter(count)
    folder = None if in_memory else data_folder() / "context"
    if options.folder is not None:
        folder = Path(options.folder)
    if folder is not None and salt:
        tenant = hashlib.blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=12, person=b"agentkv.tenant"
        ).hexdigest()
        folder = folder / f"tenant-{tenant}"
    notebook = Notebook(None if folder is None else folder / "notes")
    slimmer = options.slim if isinstance(options.slim, Slimmer) else None
    if options.slim is True:
        slimmer = Slimmer(outputs=_outputs(folder, options), count=count, max_tokens=options.slim_tokens)
    folding = None
    if options.summarise is not None:
        engine_tokens = getattr(engine, "context_tokens", None)
        folding = Folder(
            notebook=notebook,
            soft_tokens=options.soft_tokens(engine_tokens),
            window_tokens=options.window(engine_tokens),
            keep_last=options.keep_last,
            low_share=options.low_share,
            summary_tokens=options.summary_tokens,
            max_payback_calls=options.max_payback_calls,
            count=counter.message,
            fallback=options.fallback,
            redact=options.redact,
        )
    return Stages(
        counter=counter,
        notebook=notebook,
        slimmer=slimmer,
        folder=folding,
        as_written=getattr(engine, "sends_own_text", False),
        command_of=command_of,
    )


def _outputs(folder: Path | None, options: Context) -> Outputs:
    """The store of raw outputs; in memory where the user's own data folder cannot be written."""
    from agentkv.context.outputs import Outputs

    keep: dict[str, Any] = {"quota_bytes": options.quota_bytes, "keep_s": options.keep_days * 86_400}
    try:
        return Outputs(None if folder is None else folder / "outputs", **keep)
    except AgentKVError as error:
        if options.folder is not None:
            raise
        log.warn_once("outputs_in_memory", error=str(error), advice="raw tool outputs do not outlive this process")
        return Outputs(None, **keep)


def command_of(arguments: str) -> str:
    """The command words in a tool call's JSON arguments; "" for what is no JSON object."""
    import json

    try:
        return command_words(json.loads(arguments))
    except (ValueError, RecursionError):
        return ""


def last_session_of(engine: Engine, caller: Caller) -> str | None:
    """The caller's own branch's last session, else that of the branch it was sent from; None if the engine has none."""
    last_session = getattr(engine, "last_session", None)
    if last_session is None:
        return None
    while True:
        session: str | None = last_session(caller)
        if session is not None or not caller.branch:
            return session
        caller = replace(caller, branch=caller.branch.rpartition("|")[0])
