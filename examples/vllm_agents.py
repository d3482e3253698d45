"""Agents on vLLM with the plug-in: while a tool runs, KV that was pushed out to disk comes back before the next call.

    make engines ARGS='--only vllm'                # installs vLLM's CPU build into .venv-engines/vllm, once
    python examples/vllm_agents.py                 # starts a server of its own, small enough for a laptop without a GPU
    python examples/vllm_agents.py --serve         # only that server, until standard input ends; prints where it is
    python examples/vllm_agents.py --url http://127.0.0.1:8000/v1     # your own, started as docs/vllm.md says

Nothing in an agent changes: hints follow from `kv.tool`, and each request says whose context it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.adapters.vllm_door import DoorCaller, default_socket

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2"
START_S = 240.0
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where a server is, and where its plug-in listens ("" without it)."""

    url: str
    socket: str


def python() -> Path:
    """The interpreter that vLLM is installed for: $AGENTKV_VLLM_PYTHON, else `.venv-engines/vllm` of a checkout."""
    return Path(os.environ.get("AGENTKV_VLLM_PYTHON") or ROOT / ".venv-engines" / "vllm" / "bin" / "python")


def missing() -> str:
    """Why no server can be started here; "" if one can."""
    if not python().is_file():
        return f"vLLM is missing ({python()}): make engines ARGS='--only vllm'"
    return ""


def model_folder() -> Path:
    """SmolLM2-135M as a Hugging Face folder, converted once."""
    from llamacpp import weights

    from agentkv.engine.local.convert import converted

    return converted(weights(), progress=lambda text: print(text, file=sys.stderr))


def start(args: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen[bytes], Running]:
    """`vllm serve` as a child, whole when its port answers. Its log is `vllm.log` in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = Running(
        url=f"http://127.0.0.1:{port}/v1", socket="" if args.stock else args.socket or str(folder / "vllm.sock")
    )
    command = [
        str(python().with_name("vllm")), "serve", args.model or str(model_folder()), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--enforce-eager", "--block-size", str(args.block_tokens), "--max-model-len", str(min(args.tokens, args.pool_tokens - args.block_tokens)),
        "--max-num-seqs", "4", "--num-gpu-blocks-override", str(args.pool_tokens // args.block_tokens),
        "--shutdown-timeout", "10",
    ]  # fmt: skip
    if not args.stock:
        plug_in = [
            str(python()), "-m", "agentkv_vllm", "--cpu-gib", str(args.cpu_mib / 1024), "--disk", str(folder / "kv"),
            "--disk-gib", "2", "--socket", running.socket,
        ]  # fmt: skip
        config = subprocess.run(plug_in, env=_environment(args), check=True, capture_output=True, text=True).stdout  # noqa: S603
        command += ["--kv-transfer-config", config.strip()]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  ours
            command, env=_environment(args), cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{running.url}/models", timeout=2):  # noqa: S310
            return process, running
        time.sleep(0.3)
    _stop(process)
    log_text = (folder / "vllm.log").read_text(encoding="utf-8", errors="replace")
    raise SystemExit(f"vLLM did not start:\n{log_text[-4000:]}")


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """A checkout's own package is seen by vLLM; an installed one would be without this."""
    here = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return {
        **os.environ, "PYTHONPATH": here, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(args.threads),
        **({"VLLM_SERVER_DEV_MODE": "1"} if args.admin else {}),
    }  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    """In good order, which removes the disk tier; after that by force, with all its children."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(25)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(args: argparse.Namespace) -> None:
    """Run until standard input ends or we are told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to whoever started us; standard input ends then
    with tempfile.TemporaryDirectory(prefix="agentkv-vllm-") as temporary:
        folder = Path(args.folder or temporary)
        process, running = start(args, folder)
        try:
            print(json.dumps(asdict(running)), flush=True)
            sys.stdin.read()
        finally:
            _stop(process)


@contextlib.contextmanager
def server(
    *,
    stock: bool = False,
    pool_tokens: int = 6144,
    cpu_mib: int = 160,
    block_tokens: int = 32,
    tokens: int = 4096,
    threads: int = 2,
    folder: str = "",
    admin: bool = False,
) -> Iterator[Running]:
    """A vLLM server in a process of its own, which ends with ours. `stock`: without the plug-in.

    `pool_tokens` fit into its device pool, `cpu_mib` MiB into its CPU tier (22.5 KiB a token), the rest goes to disk. `admin`: with
    vLLM's development routes.
    """
    command = [
        sys.executable, __file__, "--serve", "--pool-tokens", str(pool_tokens), "--cpu-mib", str(cpu_mib),
        "--block-tokens", str(block_tokens), "--tokens", str(tokens), "--threads", str(threads), "--folder", folder,
        *(["--stock"] if stock else []), *(["--admin"] if admin else []),
    ]  # fmt: skip
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("vLLM did not start; is it installed? make engines ARGS='--only vllm'")
            yield Running(**json.loads(line))
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def agent(kv: AgentKV, name: str, turns: int) -> None:
    """One task: read, run a tool, go on."""
    notes = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(180))
    messages = [Message(role="user", content=f"You are {name}. {notes} Summarise your notes.")]
    with kv.task(name):
        for _ in range(turns):
            request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=12))
            answer = kv.submit(request).result(300)
            timing, usage = answer.timing, answer.usage
            told = f"{usage.input_tokens} tokens, {usage.cached_tokens} cached, first token {timing.ttft_s:.2f} s"
            print(f"{name}: {told}\n", end="")  # agents are threads: each line is written whole
            with kv.tool("pytest", args={"cmd": "pytest -q"}, expect_s=4):
                time.sleep(4)
            messages += [
                Message(role="assistant", content=answer.text),
                Message(role="user", content="12 passed. Go on."),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that is there already")
    parser.add_argument("--serve", action="store_true", help="only serve, until standard input ends")
    parser.add_argument("--stock", action="store_true", help="without the plug-in")
    parser.add_argument("--admin", action="store_true", help="with vLLM's development routes")
    parser.add_argument("--model", default="", help="a Hugging Face folder (default: SmolLM2-135M)")
    parser.add_argument("--pool-tokens", type=int, default=6144)
    parser.add_argument("--cpu-mib", type=int, default=160)
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default="", help="for the disk tier, socket and log (default: a temporary one)")
    parser.add_argument("--socket", default="", help="where the plug-in listens (default: in that folder)")
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    with contextlib.ExitStack() as stack:
        url = args.url
        if not url:
            running = stack.enter_context(server(pool_tokens=3328, cpu_mib=64))  # so small that contexts go to disk
            url, os.environ["AGENTKV_VLLM_SOCKET"] = running.url, running.socket
        kv = stack.enter_context(AgentKV.remote(base_url=url, model=MODEL, ledger="memory", context=None))
        threads = [threading.Thread(target=agent, args=(kv, name, 3)) for name in ("ada", "bob", "cyd")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(kv.stats()["reach"], indent=1))
        caller = DoorCaller(default_socket())
        if caller.is_there():
            state = caller.state()
            print(f"{state['promotions']} promotions brought {state['promoted_blocks']} blocks back from disk")
        caller.close()


if __name__ == "__main__":
    main()
