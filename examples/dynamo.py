"""Agents on NVIDIA Dynamo: each call says who it is and how urgent, each tool is an event, each end is told.

    make engines ARGS='--only dynamo'              # installs Dynamo into .venv-engines/dynamo, once
    python examples/dynamo.py                      # a frontend and a mock engine with two workers, in processes of their own
    python examples/dynamo.py --serve              # only those, until standard input ends; prints where they are
    python examples/dynamo.py --url http://127.0.0.1:8000/v1 --events tcp://127.0.0.1:20390     # your own frontend

Nothing in an agent changes. The mock engine computes nothing and answers at random; router, cache bookkeeping and protocol
are the real ones. Yours would be started as `start()` shows, with `dynamo.vllm` or another engine in the mocker's place.
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
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentkv import AgentKV, Message, Request, Sampling

MODEL = "smollm2"
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where a frontend is: its address, where it takes tool events, and the file of its own records (JSON lines)."""

    url: str
    events: str
    trace: str

    def records(self) -> list[dict[str, Any]]:
        """What it has written so far; it writes a few times a second."""
        try:
            lines = Path(self.trace).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line)["event"] for line in lines if line.endswith("}")]


def python() -> Path:
    """The interpreter that Dynamo is installed for: $AGENTKV_DYNAMO_PYTHON, else `.venv-engines/dynamo` of a checkout."""
    here = Path(__file__).resolve().parents[1] / ".venv-engines" / "dynamo" / "bin" / "python"
    return Path(os.environ.get("AGENTKV_DYNAMO_PYTHON") or here)


def installed() -> bool:
    """Whether Dynamo can be started here."""
    tried = [str(python()), "-c", "import dynamo._core"]
    return python().is_file() and subprocess.run(tried, cwd="/", check=False).returncode == 0  # noqa: S603


def tokenizer_folder() -> Path:
    """A Hugging Face folder with SmolLM2's tokenizer: the mock engine needs no more of a model."""
    from llamacpp import weights

    from agentkv.engine.local.convert import converted

    return converted(weights(), progress=lambda text: print(text, file=sys.stderr))


def start(folder: Path, args: argparse.Namespace) -> Iterator[Running]:
    """Frontend and mock engine, until the generator is closed; `args` are those of `main`.

    No etcd and no NATS: workers are found in a folder, requests go by TCP, events by ZMQ.
    """
    model = Path(args.model) if args.model else tokenizer_folder()
    port, events_port = _free_ports(2)
    running = Running(
        url=f"http://127.0.0.1:{port}/v1", events=f"tcp://127.0.0.1:{events_port}", trace=str(folder / "trace")
    )
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    shared = {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    traced = {  # for the frontend alone: whoever starts first binds the events' address
        "DYN_REQUEST_TRACE": "1",
        "DYN_REQUEST_TRACE_SINKS": "jsonl",
        "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
        "DYN_REQUEST_TRACE_FILE_PATH": running.trace,
        "DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS": "100",
        "DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT": running.events,
    }
    affinity = ["--router-session-affinity-ttl-secs", str(args.affinity_s)] if args.affinity_s else []
    queue = ["--router-queue-threshold", str(args.queue_threshold)] if args.queue_threshold >= 0 else []
    frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", args.router]
    engine = [
        "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, "--num-workers", str(args.workers),
        "--num-gpu-blocks-override", str(args.blocks), "--block-size", "16", "--speedup-ratio", str(args.speedup),
    ]  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, command, env in (
            ("frontend", [*frontend, *affinity, *queue, *planes], shared | traced),
            ("engine", [*engine, *planes], shared),
        ):
            with (folder / f"{name}.log").open("wb") as log:
                run = [str(python()), "-m", *command]
                processes.append(subprocess.Popen(run, env=env, cwd=folder, stdout=log, stderr=log))  # noqa: S603
        _wait(running, processes, folder, args.workers)
        yield running
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(running: Running, processes: list[subprocess.Popen[bytes]], folder: Path, workers: int) -> None:
    """Until the frontend knows the model and all its workers."""
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and all(process.poll() is None for process in processes):
        with contextlib.suppress(OSError, ValueError):
            models = _get(f"{running.url}/models")["data"]
            health = _get(f"{running.url.removesuffix('/v1')}/health")["instances"]
            if models and sum(instance["endpoint"] == "generate" for instance in health) >= workers:
                return
        time.sleep(0.1)
    logs = "\n".join(file.read_text(encoding="utf-8", errors="replace")[-2000:] for file in folder.glob("*.log"))
    raise RuntimeError(f"Dynamo was not there after {START_S:.0f} s:\n{logs}")


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  ours, on loopback
        return json.load(answer)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]


@contextlib.contextmanager
def server(**options: Any) -> Iterator[Running]:
    """`start` in a process of its own, which ends with ours, whatever becomes of us. `options` are those of `main`."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, "--serve", *given]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("Dynamo did not start; is it installed? make engines ARGS='--only dynamo'")
            yield Running(**json.loads(line))
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def serve(args: argparse.Namespace) -> None:
    """Run until standard input ends or we are told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to whoever started us; standard input ends then
    with tempfile.TemporaryDirectory() as folder:
        made = start(Path(folder), args)
        with contextlib.closing(made):  # type: ignore[type-var]  # it is a generator
            print(json.dumps(asdict(next(made))), flush=True)
            sys.stdin.read()


def agent(kv: AgentKV, name: str, turns: int) -> None:
    """One task: read, run a tool, go on."""
    notes = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(60))
    messages = [Message(role="user", content=f"You are {name}. {notes} Summarise your notes.")]
    with kv.task(name):
        for _ in range(turns):
            request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=24))
            answer = kv.submit(request).result(60)
            usage = answer.usage
            print(f"{name}: {usage.input_tokens} tokens, {usage.cached_tokens} cached\n", end="")  # whole lines
            with kv.tool("pytest", args={"cmd": "pytest -q"}, expect_s=1):
                time.sleep(1)
            messages += [
                Message(role="assistant", content=answer.text),
                Message(role="user", content="12 passed. Go on."),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a frontend that is there already")
    parser.add_argument("--events", default="", help="where it takes tool events (its own variable of that name)")
    parser.add_argument("--serve", action="store_true", help="only serve, until standard input ends")
    parser.add_argument("--model", help="a Hugging Face folder, for its tokenizer (default: SmolLM2's)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--router", default="kv")
    parser.add_argument("--affinity-s", type=int, default=300, help="how long a session stays on its worker (0: off)")
    parser.add_argument(
        "--queue-threshold", type=float, default=-1, help="requests queue by priority (0: at once; -1: not)"
    )
    parser.add_argument("--speedup", type=float, default=10, help="of the mock engine")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of 16 tokens in each worker")
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    with contextlib.ExitStack() as stack:
        running = Running(url=args.url, events=args.events, trace="") if args.url else stack.enter_context(server())
        if running.events:
            os.environ["DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT"] = running.events
        kv = stack.enter_context(AgentKV.remote(base_url=running.url, model=MODEL, ledger="memory"))
        threads = [threading.Thread(target=agent, args=(kv, name, 3)) for name in ("ada", "bob", "cyd")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in ("ada", "bob", "cyd"):
            kv.finish(name)
        time.sleep(0.5)
        print(kv.stats()["reach"])


if __name__ == "__main__":
    main()
