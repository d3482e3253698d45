"""`agentkv serve` as a process: the first line, signals, and one sentence for each thing that cannot work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.errors import AgentKVError


class Process:
    """The command in a process of its own, with its address once it is ready."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentkv.cli", "serve", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings,
        )  # fmt: skip

    def url(self) -> str:
        """Wait for the line that says it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is ready at http://" in line, line + self.ended()[1]
        return line.split(" is ready at ")[1].strip()

    def ended(self) -> tuple[int, str]:
        """Exit status and what was said on the way."""
        _, said = self.process.communicate(timeout=90)
        return self.process.returncode, said


@pytest.fixture
def run():
    processes: list[Process] = []

    def start(*arguments: str, **environment: str) -> Process:
        processes.append(Process(*arguments, **environment))
        return processes[-1]

    yield start
    for one in processes:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.mark.timeout(300)
def test_it_serves_and_drains_on_sigterm(run, folder_of):
    """Ready at a free port, answers, counts, keys; SIGTERM in mid-stream: the stream ends whole, and the exit is clean."""
    folder = folder_of()
    server = run(
        str(folder),
        "--port",
        "0",
        "--name",
        "tiny",
        "--ledger",
        "memory",
        "--device-memory",
        "2MiB",
        AGENTKV_API_KEY="sk-serve-1234",
    )
    url = server.url()
    client = openai.OpenAI(base_url=url, api_key="sk-serve-1234", max_retries=0, timeout=30)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    assert client.chat.completions.create(**ask, max_tokens=4).usage.completion_tokens <= 4
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="sk-wrong", max_retries=0).models.list()
    stream = client.chat.completions.create(
        **ask, max_tokens=60, stream=True, stream_options={"include_usage": True}, temperature=0
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert rest[-1].usage is not None
    assert rest[-2].choices[0].finish_reason in {"stop", "length"}
    code, said = server.ended()
    assert (0, True) == (code, said.endswith("agentkv: stopped\n")), said
    assert "loading" in said
    assert "sk-serve" not in said
    client.close()


@pytest.mark.timeout(300)
def test_it_serves_with_a_template_of_the_users_to_a_page_of_another_origin(run, folder_of, tmp_path):
    """A base model answers chats as the file says; a browser hears that the page's scripts may read it."""
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:")
    page = "https://app.example.com"
    server = run(
        str(folder_of(template=None)), "--port", "0", "--name", "base", "--ledger", "memory", "--device-memory", "2MiB",
        "--chat-template", str(template), "--allow-origin", page, "--allow-origin", "http://localhost:3000",
    )  # fmt: skip
    url = server.url()
    with httpx2.Client(base_url=url, timeout=30, headers={"origin": page}, trust_env=False) as client:
        ask = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = client.post("/chat/completions", json=ask)
        counted = client.post(url.removesuffix("/v1") + "/tokenize", json=ask).json()
    assert (200, page) == (answer.status_code, answer.headers["access-control-allow-origin"])
    assert len("user: hi\nassistant:") == counted["count"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait(run, folder_of):
    """Ctrl-C twice ends it at once, whatever is under way."""
    server = run(str(folder_of()), "--port", "0", "--ledger", "memory", "--drain", "60", "--name", "m")
    url = server.url()

    def read() -> None:
        body = {"model": "m", "prompt": "x", "max_tokens": 900, "stream": True, "temperature": 0, "seed": 1}
        try:
            with httpx2.stream("POST", f"{url}/completions", json=body, timeout=30) as response:
                for _ in response.iter_bytes():
                    started.set()
        except httpx2.HTTPError:
            pass

    started = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(20)
    server.process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(15)
    reader.join()


REFUSED = [
    (["--host", "0.0.0.0"], "without an API key"),
    (["--keys", "/nowhere/keys.toml"], "key file /nowhere/keys.toml cannot be read"),
    (["/nowhere/model"], "/nowhere/model"),
    (["--policy", "magic"], "magic"),
    (["--port", "70000"], "port=70000"),
    (["--device-memory", "lots"], "lots"),
    (["--chat-template", "/nowhere/mine.jinja"], "/nowhere/mine.jinja"),
    (["--allow-origin", "https://app.example.com/"], "is no origin"),
    (["--base-url", "http://127.0.0.1:1/v1", "--disk", "/tmp", "--dtype", "auto"], "--dtype, --disk: of a model"),
]


def refused(*arguments: str) -> str:
    """Run the command here; the sentence with which it ends."""
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, AgentKVError), result.output
    return str(result.exception) + result.stderr


@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_one_sentence(folder_of, arguments, told):
    """One of our own errors, which `main` prints without a traceback."""
    model = [] if arguments[0].startswith("/") else [str(folder_of())]
    assert told in refused(*model, *arguments, *([] if "--port" in arguments else ["--port", "0"]))


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_told_before_the_model_is_loaded(monkeypatch, package):
    """With what to install, whichever of them it is."""
    monkeypatch.setitem(sys.modules, package, None)
    said = refused("/nowhere/model")
    assert f"agentkv serve needs {package}: pip install 'agentkv-sdk[local,serve]'" in said
    assert "loading" not in said


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    """At once: nobody waits for a model that cannot be served."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("/nowhere/model", "--port", str(taken.getsockname()[1]))
    assert "is in use; choose another one with --port" in said
    assert "loading" not in said


@pytest.mark.slow
def test_another_endpoints_model_is_served(run, scripted_place):
    """With --base-url: the same doors over a server elsewhere."""
    place = scripted_place("Hello to you")
    server = run("scripted", "--base-url", f"{place.url}/v1", "--port", "0", "--ledger", "memory")
    client = openai.OpenAI(base_url=server.url(), api_key="x", max_retries=0)
    reply = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}])
    assert "Hello to you" == reply.choices[0].message.content
    client.close()


def test_the_help_teaches():
    """Examples, keys and how a client connects."""
    said = " ".join(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"}).output.split())
    for part in ("agentkv serve smollm2-135m", "AGENTKV_API_KEY", "[keys.alice]", "base_url=", "SIGTERM", "--drain"):
        assert part in said, part


def test_the_help_says_what_other_servers_options_are_called_here():
    """What people know from vLLM, llama.cpp and Ollama, each beside what we have; and what is named is there."""
    said = " ".join(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output.split())
    told = said[said.index("Coming from another server") : said.index("Arguments")]
    for known in ("--api-key", "--served-model-name", "--alias", "--max-model-len", "--ctx-size", "--max-num-seqs"):
        assert known in told, known
    for ours in ("--name", "--device-memory", "--host-memory", "--disk"):
        assert ours in told, ours
        assert said.count(ours) > 1, ours
