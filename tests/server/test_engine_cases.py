"""Cases that users of other servers reported, on the real embedded engine with a tiny model, through a socket.

E1 and E2: templates that refuse. E3, E5: messages without content, content in parts. E19: bad requests beside a good
stream. E20: half characters. E21: prompts that do not fit. E28: usage. E29: every field has an effect or is refused.
"""

from __future__ import annotations

import json
import threading

import openai
import pytest
from agentkv_langgraph import ChatAgentKV
from langchain_openai import ChatOpenAI

from agentkv import AgentKV, Message, Request, Sampling
from agentkv.engine.base import changed
from agentkv.engine.local import intake
from agentkv.errors import TemplateRejected
from agentkv.server.app import create_app
from agentkv.server.keys import Keys
from agentkv.server.transport import InProcess

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "rules"}
DEVELOPER = {"role": "developer", "content": "rules"}
SAID = {"role": "assistant", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def count(place, messages, **more) -> int:
    body = {"model": place.kv.engine.model, "messages": messages, **more}
    return place.http.post("/tokenize", json=body).json()["count"]


def bill(place):
    return place.kv.report("unattributed").usage


@pytest.mark.parametrize("stream", [False, True])
def test_e1_two_user_messages_on_a_strict_template(engine_place, models, stream):
    """Nothing is merged: a 400 with the template's own words, nothing generated, and the next call works."""
    strict = engine_place(template=models.STRICT)
    answer = strict.chat(messages=[SYSTEM, USER, USER], stream=stream)
    error = answer.json()["error"]
    assert (400, "template_rejected", "messages") == (answer.status_code, error["code"], error["param"])
    assert "Conversation roles must alternate" in error["message"]
    assert 0 == bill(strict).output_tokens
    assert 200 == strict.chat(messages=[SYSTEM, USER], stream=stream).status_code


def test_e1_the_same_through_langchain(engine_place, models):
    """The third door has the same contract: our typed error with the template's words; a call that alternates works."""
    place = engine_place(template=models.STRICT)
    model = ChatAgentKV(place.kv, max_tokens=4)
    with pytest.raises(TemplateRejected, match="Conversation roles must alternate"):
        model.invoke([("system", "rules"), ("user", "hello"), ("user", "again")])
    assert 4 >= model.invoke([("system", "rules"), ("user", "hello")]).usage_metadata["output_tokens"]


@pytest.mark.parametrize(
    "messages",
    [[SYSTEM, USER], [SYSTEM, SYSTEM, USER], [USER, SAID, SYSTEM, USER], [DEVELOPER, USER]],
    ids=["first", "twice", "in the middle", "developer"],
)
def test_e2_a_template_without_system_role(engine_place, models, messages):
    """The same contract: a typed 400 with the template's words, nothing billed, and the next call works."""
    place = engine_place(template=models.NO_SYSTEM)
    answer = place.chat(messages=messages)
    error = answer.json()["error"]
    assert (400, "template_rejected", "messages") == (answer.status_code, error["code"], error["param"])
    assert "System role not supported" in error["message"]
    response = place.http.post(
        "/v1/responses", json={"model": place.kv.engine.model, "input": "x", "instructions": "rules"}
    )
    error = response.json()["error"]
    assert (400, "template_rejected", "input") == (response.status_code, error["code"], error["param"])
    assert (0, 0) == (bill(place).output_tokens, bill(place).input_tokens)
    assert 200 == place.chat(messages=[USER]).status_code


def test_e2_developer_is_the_newer_name_of_system(engine_place):
    """Where the template has a system role, both give the same prompt."""
    place = engine_place()
    assert count(place, [SYSTEM, USER]) == count(place, [DEVELOPER, USER])
    assert place.chat(messages=[SYSTEM, USER] * 3).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = place.chat(messages=[DEVELOPER, USER] * 3).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] // 16 * 16


def test_e3_calls_without_content_give_one_prompt(engine_place):
    """null, "" and no content at all: the same tokens and the same reuse; an empty turn without calls is accepted."""
    place = engine_place()
    spelled = [{"content": None}, {"content": ""}, {}]
    used = []
    for content in spelled:
        history = [USER, {"role": "assistant", "tool_calls": [CALL], **content}]
        history.append({"role": "tool", "tool_call_id": "call_1", "content": "done " * 20})
        used.append(place.chat(messages=history, tools=[TOOL]).json()["usage"])
    assert 1 == len({usage["prompt_tokens"] for usage in used})
    assert [0] == [used[0]["prompt_tokens_details"]["cached_tokens"]]
    full = (used[0]["prompt_tokens"] - 1) // 16 * 16
    assert [full, full] == [usage["prompt_tokens_details"]["cached_tokens"] for usage in used[1:]]
    for content in spelled:
        assert 200 == place.chat(messages=[USER, {"role": "assistant", **content}, USER]).status_code


def test_e5_text_and_parts_give_one_prompt(engine_place):
    """Tool results and user texts: one text, one part, or many parts, in chats and in responses."""
    place = engine_place()
    model = place.kv.engine.model

    def prompt(said, result) -> dict:
        history = [{"role": "user", "content": said}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
        history.append({"role": "tool", "tool_call_id": "call_1", "content": result})
        return place.chat(messages=history, tools=[TOOL]).json()["usage"]

    def parts(*texts: str, kind: str = "text") -> list[dict]:
        return [{"type": kind, "text": text} for text in texts]

    first = prompt("Look at it. " * 9, "It is fine. " * 9)
    full = (first["prompt_tokens"] - 1) // 16 * 16
    for said, result in [
        (parts("Look at it. " * 9), parts("It is fine. " * 9)),
        (parts(*["Look at it. "] * 9), parts(*["It is fine. "] * 9)),
        (parts("Look at", " it. ", *["Look at it. "] * 8), "It is fine. " * 9),
    ]:
        usage = prompt(said, result)
        assert (first["prompt_tokens"], full) == (
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )
    items = [
        {"role": "user", "content": parts(*["Look at it. "] * 9, kind="input_text")},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path": "a.py"}'},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": parts(*["It is fine. "] * 9, kind="input_text"),
        },
    ]
    flat = {"type": "function", **TOOL["function"]}
    body = {"model": model, "input": items, "tools": [flat], "max_output_tokens": 2}
    usage = place.http.post("/v1/responses", json=body).json()["usage"]
    assert (first["prompt_tokens"], full) == (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


BAD = [
    {"logit_bias": {"99999999": 50}},
    {"logit_bias": {"a": 1}},
    {"stop": [str(n) for n in range(10_000)]},
    {"max_tokens": -1},
    {"max_tokens": 10**6},
    {"n": 0},
    {"temperature": "hot"},
    {"messages": [{"role": "user", "content": 5}]},
    {"top_p": 0},
    {"seed": "x"},
    {"tools": [{"type": "function", "function": {"name": 5}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}},
]


def test_e19_bad_requests_beside_a_good_stream(engine_place):
    """Ten bad ones while it runs: each a 400 of its own, and the good one says what it says alone."""
    place = engine_place(blocks=128)
    ask = {"max_tokens": 120, "temperature": 0.9, "seed": 7}
    alone = place.chat(**ask).json()["choices"][0]["message"]["content"]
    started, chunks = threading.Event(), []

    def read() -> None:
        stream = place.openai().chat.completions.create(
            model=place.kv.engine.model, messages=[{"role": "user", "content": "hello there"}], stream=True, **ask
        )
        for chunk in stream:
            chunks.append(chunk.choices[0].delta.content or "")
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(20)
    statuses = [place.chat(**bad).status_code for bad in BAD]
    reader.join()
    assert [400] * len(BAD) == statuses
    assert alone == "".join(chunks)


HALF = "half \ud800 of it"
WHERE = {
    "user text": {"messages": [{"role": "user", "content": HALF}]},
    "user part": {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    "tool result": {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": HALF}]},
    "call id": {"messages": [USER, {"role": "tool", "tool_call_id": HALF, "content": "x"}]},
    "tool name": {"tools": [{"type": "function", "function": {"name": HALF}}]},
    "tool schema": {"tools": [{"type": "function", "function": {"name": "x", "parameters": {HALF: 1}}}]},
    "metadata": {"metadata": {"run": HALF}},
    "stop": {"stop": HALF},
    "user": {"user": HALF},
}


@pytest.mark.parametrize("where", WHERE)
def test_e20_half_a_character_is_refused_everywhere(engine_place, where):
    """A typed 400, whole and streamed, and nothing on the bill."""
    place = engine_place()
    for stream in (False, True):
        body = {"model": place.kv.engine.model, "messages": [USER], "stream": stream, **WHERE[where]}
        answer = place.http.post("/v1/chat/completions", content=json.dumps(body))
        assert (400, "invalid_unicode") == (answer.status_code, answer.json()["error"]["code"])
    body = {"model": place.kv.engine.model, "input": HALF}
    assert 400 == place.http.post("/v1/responses", content=json.dumps(body)).status_code
    assert 0 == bill(place).total_tokens
    assert 200 == place.chat().status_code


@pytest.mark.parametrize(
    "shape",
    ["{}", '{"a": "{}"}', '{"{}": 1}', '["{}"]'],
    ids=["in a text", "in an object", "in a name", "in a list"],
)
@pytest.mark.parametrize("field", ["messages", "input", "instructions", "metadata", "chat_template_kwargs", "unknown"])
def test_e20_bytes_that_are_no_text_are_refused_everywhere(engine_place, field, shape):
    """Half a character needs no escape, and a byte may be none at all: 400 in our own shape, before a token is computed."""
    place = engine_place()
    for bad in (b"\xed\xa0\x80", b"\xff", b"\xc3"):
        value = json.dumps(shape) if shape == "{}" else shape
        told = (
            f'{{"model": "{place.kv.engine.model}", "{field}": {value}'.replace("{}", "@").encode().replace(b"@", bad)
        )
        for path, rest in (("chat/completions", "messages"), ("responses", "input"), ("completions", "prompt")):
            more = b"" if rest == field else b', "%s": "hi"' % rest.encode()
            answer = place.http.post(f"/v1/{path}", content=told + more + b"}")
            assert (400, "invalid_unicode") == (answer.status_code, answer.json()["error"]["code"])
    assert 0 == bill(place).total_tokens
    assert 200 == place.chat().status_code


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_number_that_cannot_be_told_again_is_refused(engine_place, stream):
    """A response repeats its tools: what no JSON number holds is no schema."""
    place = engine_place()
    bound = '{"type": "object", "properties": {"a": {"type": "number", "maximum": 1e999}}}'
    tool = f'{{"type": "function", "name": "f", "parameters": {bound}}}'
    body = f'{{"model": "{place.kv.engine.model}", "input": "hi", "stream": {stream}, "tools": [{tool}]}}'
    answer = place.http.post("/v1/responses", content=body.encode())
    assert (400, "invalid_json") == (answer.status_code, answer.json()["error"]["code"])


def test_a_refusal_names_the_field_of_the_door_that_was_used(engine_place):
    """A prompt that does not fit is `messages`, `prompt` or `input`, and its limit has the door's own name."""
    place = engine_place(blocks=32)
    long = "x" * 600
    for path, name, limit, content in (
        ("chat/completions", "messages", "max_tokens", [{"role": "user", "content": long}]),
        ("completions", "prompt", "max_tokens", long),
        ("responses", "input", "max_output_tokens", long),
    ):
        body = {"model": place.kv.engine.model, name: content, limit: 7}
        error = place.http.post(f"/v1/{path}", json=body).json()["error"]
        assert ("context_length_exceeded", name) == (error["code"], error["param"])
        assert f"{limit} is 7" in error["message"]


def test_e20_half_a_character_in_process(folder_of):
    """Past the JSON: in a Request, a task's name and a ledger on disk a typed error or a replacement, never a crash."""
    with AgentKV.local(str(folder_of()), device="cpu", dtype="float32", device_memory="2MiB", context=None) as kv:
        with kv.task("half \ud800 task", final=False):
            with kv.tool("half \ud800 tool", args={"cmd": HALF}):
                pass
            with pytest.raises(ValueError, match="surrogate"):
                kv.submit(Request(messages=(Message(role="user", content=HALF),)))
            kv.submit(Request(prompt="fine", sampling=Sampling(max_tokens=2))).result(20)
        assert 2 >= kv.report("half \ud800 task").usage.output_tokens > 0


def test_e20_nul_passes_or_is_refused(engine_place):
    """It is a character like any other in texts."""
    place = engine_place()
    answer = place.chat(messages=[{"role": "user", "content": "a\x00b"}], metadata={"x": "\x00"})
    assert 200 == answer.status_code
    assert 400 == place.http.post("/v1/chat/completions", content=b'{"model": "\x00"}').status_code


def test_e21_what_does_not_fit_is_refused_at_once(engine_place):
    """Prompt over the context, prompt and output over it, and a prompt over the device memory: both numbers in each."""
    place = engine_place(blocks=32)  # 512 tokens of memory, 1,024 of context
    small = engine_place(blocks=128)
    for server, fields, limit in (
        (small, {"messages": [{"role": "user", "content": "x" * 1200}]}, "1024"),
        (small, {"max_tokens": 1020}, "1024"),
        (place, {"messages": [{"role": "user", "content": "x" * 600}]}, "512"),
    ):
        for stream in (False, True):
            answer = server.chat(**fields, stream=stream)
            error = answer.json()["error"]
            assert (400, "context_length_exceeded") == (answer.status_code, error["code"])
            assert limit in error["message"]
            assert sum(word.strip(":,.").isdecimal() for word in error["message"].split()) >= 2
            assert answer.elapsed.total_seconds() < 10
        assert 200 == server.chat().status_code


def test_e21_others_go_on_beside_it(engine_place):
    """A queue of calls that fit is not held up by one that does not."""
    place = engine_place(blocks=32)
    results = []

    def work(number: int) -> None:
        long = number % 2
        answer = place.chat(messages=[{"role": "user", "content": "x" * (600 if long else 20)}], max_tokens=6)
        results.append((long, answer.status_code))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(0, 200)] * 5 + [(1, 400)] * 5 == sorted(results)


@pytest.mark.parametrize("cancel", [False, True])
def test_e28_usage_equals_the_ledgers_row(engine_place, cancel):
    """Whole and streamed say what the bill says; a cancelled stream is billed for what was generated, and told nothing."""
    place = engine_place(blocks=128)
    body = {"max_tokens": 300, "temperature": 0.8, "seed": 3}
    headers = {"x-agentkv-task": "job"}
    if cancel:
        ask = {"model": place.kv.engine.model, "messages": [USER], **body, "stream": True}
        with place.openai().chat.completions.create(**ask, extra_headers=headers) as stream:
            for number, chunk in enumerate(stream):
                assert chunk.usage is None
                if number == 4:
                    break
        wait_idle(place)
        (row,) = place.kv.report("job").calls
        assert ("aborted", True) == (row.status, 1 <= row.usage.output_tokens < 300)
        return
    for stream in (False, True):
        ask = {"model": place.kv.engine.model, "messages": [USER], **body, "max_tokens": 20}
        extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = place.http.post("/v1/chat/completions", json=ask | extra, headers=headers)
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        usage = (json.loads(lines[-2]) if stream else answer.json())["usage"]
        row = place.kv.report("job").calls[-1].usage
        told = (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        assert (row.input_tokens, row.output_tokens, row.cached_tokens) == told


def wait_idle(place) -> None:
    for _ in range(400):
        stats = place.kv.engine.stats()
        if not stats["running"] + stats["waiting"] + stats["loading"] + place.life.active:
            return
        threading.Event().wait(0.01)
    pytest.fail("calls are still under way")


FIELDS = {
    "n": {"n": 2},
    "logprobs": {"logprobs": True},
    "logit_bias": {"logit_bias": {"65": -100}},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "tools.strict": {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]},
    "response_format": {"response_format": {"type": "json_object"}},
    "continue_final_message": {
        "messages": [USER, SAID], "continue_final_message": True, "add_generation_prompt": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_e29_what_the_engine_cannot_do_it_refuses_by_name(engine_place, name):
    """Each field that not every engine has: a 400 naming it, or (once it can) a 200."""
    place = engine_place()
    answer = place.chat(**FIELDS[name])
    if name in intake._CAN:
        assert 200 == answer.status_code, answer.text
    else:
        error = answer.json()["error"]
        assert (400, name, "unsupported_value") == (answer.status_code, error["param"], error["code"])


def said(place, **fields) -> str:
    answer = place.chat(**{"max_tokens": 40, **fields})
    assert 200 == answer.status_code, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_e29_sampling_fields_have_their_effect(engine_place):
    """Seed, temperature, top_p, stop and both names of the limit, each seen in the answer."""
    place = engine_place()
    greedy = said(place, temperature=0)
    assert greedy == said(place, temperature=0) == said(place, temperature=1.5, top_p=1e-6)
    drawn = {said(place, temperature=1.5, seed=seed) for seed in range(4)}
    assert len(drawn) > 1
    assert said(place, temperature=1.5, seed=1) == said(place, temperature=1.5, seed=1)
    assert len({said(place, temperature=1.5) for _ in range(4)}) > 1
    for limit in ("max_tokens", "max_completion_tokens"):
        usage = place.chat(**{"max_tokens": None, limit: 3}, temperature=0).json()["usage"]
        assert 3 == usage["completion_tokens"]
    stop = greedy[5:8]
    assert greedy[: greedy.index(stop)] == said(place, temperature=0, stop=stop)


def test_e29_streams_say_what_whole_answers_say(engine_place):
    """Text and finish reason, with a stop text that crosses tokens and with a limit."""
    place = engine_place()
    greedy = said(place, temperature=0)
    for fields in ({"max_tokens": 7}, {"stop": greedy[4:9]}, {"stop": [greedy[30:33], "never there"]}):
        ask = {"max_tokens": 40, "temperature": 0, **fields}
        whole = place.chat(**ask).json()["choices"][0]
        client = place.openai()
        chunks = list(
            client.chat.completions.create(
                model=place.kv.engine.model, messages=[{"role": "user", "content": "hello there"}], stream=True, **ask
            )
        )
        assert whole["message"]["content"] == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole["finish_reason"] == chunks[-1].choices[0].finish_reason


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def test_e29_held_answers_are_what_was_asked_for(engine_place):
    """A schema, a required call, a named call, a strict tool, one call at most: valid with a model that knows nothing."""
    place = engine_place()
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    whole = place.chat(response_format=shape, max_tokens=60, temperature=1.5, seed=1).json()["choices"][0]
    assert ("stop", True) == (
        whole["finish_reason"],
        json.loads(whole["message"]["content"])["answer"] in {"yes", "no"},
    )
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
        for name in ("ask", "tell")
    ]
    for choice, names in (
        ("required", {"ask", "tell"}),
        ({"type": "function", "function": {"name": "tell"}}, {"tell"}),
    ):
        asked = {
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 120,
            "temperature": 1,
        }
        whole = place.chat(**asked, seed=2).json()["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        assert ("tool_calls", True) == (whole["finish_reason"], call["function"]["name"] in names)
        assert json.loads(call["function"]["arguments"])["answer"] in {"yes", "no"}
        with place.openai().chat.completions.stream(
            model=place.kv.engine.model, messages=[{"role": "user", "content": "hello there"}], seed=2, **asked
        ) as stream:
            stream.until_done()
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert call["function"] == {"name": streamed.function.name, "arguments": streamed.function.arguments}


def test_e29_choices_logprobs_bias_and_penalties_have_their_effect(engine_place):
    """Three seeded choices differ, and are the same again; bytes join to the text; a banned letter is never written."""
    place = engine_place()
    asked = {"n": 3, "seed": 5, "temperature": 1.2, "max_tokens": 12}
    texts = [[c["message"]["content"] for c in place.chat(**asked).json()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert 3 == len(set(texts[0]))
    choice = place.chat(logprobs=True, top_logprobs=3, temperature=0, max_tokens=12).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"].encode() == bytes(byte for entry in entries for byte in entry["bytes"])
    assert all(len(e["top_logprobs"]) == 3 and e["logprob"] == e["top_logprobs"][0]["logprob"] <= 0 for e in entries)
    greedy = said(place, temperature=0)
    ids = place.kv.engine._intake.tokeniser.encode(greedy[0]).ids
    banned = said(place, temperature=0, logit_bias={str(ids[0]): -100})
    assert greedy[0] not in banned
    assert greedy != said(place, temperature=0, frequency_penalty=2, presence_penalty=2)
    count = place.chat(**asked).json()["usage"]
    assert count["completion_tokens"] <= 36 < count["completion_tokens"] + count["prompt_tokens"]


def test_e29_a_final_message_is_gone_on_with(engine_place):
    """Only what is new is in the answer: beginning with the greedy answer's first half gives its second."""
    place = engine_place()
    greedy = said(place, temperature=0, max_tokens=30)
    half = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": greedy[:12]}]
    rest = said(
        place,
        messages=half,
        continue_final_message=True,
        add_generation_prompt=False,
        temperature=0,
        max_tokens=30 - 12,
    )
    assert greedy.startswith(greedy[:12] + rest[:10])


def test_e29_echo_and_completions(engine_place):
    """The raw prompt is repeated before the text."""
    place = engine_place()
    body = {"model": place.kv.engine.model, "prompt": "Once upon", "max_tokens": 5, "temperature": 0}
    plain = place.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    echoed = place.http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]["text"]
    assert "Once upon" + plain == echoed


def test_a_model_without_a_template_still_completes(engine_place):
    """Chats are refused with the way out, completions work."""
    place = engine_place(template=None)
    answer = place.chat()
    assert (400, "no_chat_template") == (answer.status_code, answer.json()["error"]["code"])
    body = {"model": place.kv.engine.model, "prompt": "Once", "max_tokens": 3}
    assert 200 == place.http.post("/v1/completions", json=body).status_code


def test_tenants_of_one_engine_see_their_own_usage(engine_place):
    """Two keys at once on the real engine: bills apart."""
    keys = Keys.read(None, {"AGENTKV_API_KEYS": "alice=sk-alice-1234,bob=sk-bob-12345"})
    place = engine_place(keys=keys)
    for key, calls in (("sk-alice-1234", 2), ("sk-bob-12345", 1)):
        client: openai.OpenAI = place.openai(key)
        for _ in range(calls):
            client.chat.completions.create(model=place.kv.engine.model, messages=[USER], max_tokens=3)
    assert (2, 1) == (len(place.kv.report("alice/default").calls), len(place.kv.report("bob/default").calls))


@pytest.mark.parametrize("count", [2, 5])
def test_e15_parallel_calls_of_the_engine(engine_place, count):
    """Forced to write two and five calls: indexes from 0 on, ids unique over the whole task, and LangChain's sum has them all."""
    place = engine_place(blocks=512)
    kv = place.kv
    spelled = "".join(f'<tool_call>{{"name": "read", "arguments": {{"n": {n}}}}}</tool_call>' for n in range(count))
    ids = tuple(kv.engine._intake.tokeniser.encode(spelled).ids)

    def forced(request: Request):
        return kv.submit(changed(request, forced_ids=ids))

    app = create_app(forced, model="tiny", count_tokens=kv.engine.count_tokens)
    ask = {"model": "tiny", "messages": [USER], "tools": [TOOL], "max_tokens": len(ids)}
    with InProcess(app) as doors:
        client = doors.openai()
        whole = client.chat.completions.create(**ask).choices[0]
        deltas = [
            delta
            for chunk in client.chat.completions.create(**ask, stream=True)
            for delta in chunk.choices[0].delta.tool_calls or []
        ]
        chat = ChatOpenAI(model="tiny", client=client.chat.completions, async_client=object(), api_key="x")
        summed = None
        for piece in chat.bind_tools([TOOL]).stream("hello"):
            summed = piece if summed is None else summed + piece
    assert "tool_calls" == whole.finish_reason
    assert list(range(count)) == sorted({delta.index for delta in deltas})
    told = [[call.id for call in whole.message.tool_calls], [delta.id for delta in deltas if delta.id]]
    told.append([call["id"] for call in summed.tool_calls])
    assert [count] * 3 == [len(ids_) for ids_ in told]
    assert 3 * count == len({id_ for ids_ in told for id_ in ids_})
    wanted = [{"n": n} for n in range(count)]
    assert wanted == [json.loads(call.function.arguments) for call in whole.message.tool_calls]
    assert wanted == [call["args"] for call in summed.tool_calls]
