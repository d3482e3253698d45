"""What a loaded model does as its makers meant it: start and end tokens, templates, heads, padding, types, offline."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from agentkv_langgraph import ChatAgentKV, LangGraphHost
from langchain_core.messages import AIMessageChunk

from agentkv import AgentKV
from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local import dtypes, identity, quantised
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model, suggestions_in
from agentkv.errors import ConfigError, ExtraMissing, ModelError, RequestInvalid, UnsupportedModel

TURNS = (Message(role="system", content="Be brief."), Message(role="user", content="Say hello."))
_numbers = itertools.count()


def _load(folder, dtype="float32", **more):
    return load_model(str(folder), device="cpu", dtype=dtype, **more)


def _engine(loaded, blocks=40):
    return LocalEngine(loaded, device_memory=blocks * loaded.geometry.block_bytes)


def _chat(turns=TURNS, count=8, **sampling):
    return Request(
        messages=turns, sampling=Sampling(max_tokens=count, **sampling), caller=Caller(task=f"c{next(_numbers)}")
    )


def _raw(prompt, count=8, **sampling):
    return Request(
        prompt=prompt, sampling=Sampling(max_tokens=count, **sampling), caller=Caller(task=f"r{next(_numbers)}")
    )


# -- start tokens (E7)


@pytest.mark.parametrize("adds", [False, True], ids=["tokenizer adds none", "tokenizer adds one"])
@pytest.mark.parametrize("emits", [False, True], ids=["template writes none", "template writes one"])
def test_a_start_token_is_there_as_often_as_the_template_writes_it(models, tmp_path, emits, adds):
    """In chats ids equal transformers' own, in number and in the answer; a raw prompt gets the tokenizer's (E7)."""
    template = models.BOS_CHATML.replace("bos_token", "'<|endoftext|>'") if emits else models.CHATML
    folder = models.save(tmp_path, template=template, bos=adds)
    loaded, oracle = _load(folder), models.Oracle(folder)
    if adds:  # the start token of this tokenizer is what the template writes first
        template = template.replace("<|endoftext|>", models.START)
        loaded.tokenizer.chat_template = template
    turns = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    wanted = loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
    ids = list(wanted["input_ids"] if isinstance(wanted, dict) or hasattr(wanted, "keys") else wanted)
    raw = list(loaded.tokenizer("hello there")["input_ids"])
    assert adds == (raw[0] == 256)
    with _engine(loaded) as engine:
        assert raw == list(engine.text_ids("hello there"))
        answer = engine.submit(_chat()).result(60)
        assert len(ids) == answer.usage.input_tokens == engine.count_tokens(_chat())
        assert oracle.greedy(ids, 8) == list(answer.token_ids)
        plain = engine.submit(_raw("hello there")).result(60)
        assert len(raw) == plain.usage.input_tokens
        assert oracle.greedy(raw, 8) == list(plain.token_ids)


# -- templates (E8)


def test_a_base_model_answers_plain_prompts_and_says_how_it_can_chat(models, tmp_path):
    """At once, naming the option; with it, chats work (E8)."""
    folder = models.save(tmp_path / "base", template=None)
    with _engine(_load(folder)) as engine:
        with pytest.raises(RequestInvalid, match="chat_template=") as refused:
            engine.submit(_chat())
        assert "no_chat_template" == refused.value.code
        assert engine.submit(_raw("Hello")).result(60).token_ids
    file = tmp_path / "template.jinja"
    file.write_text(models.CHATML)
    answers = []
    for given in (models.CHATML, file, str(file)):
        with _engine(_load(folder, chat_template=given)) as engine:
            answers.append(engine.submit(_chat()).result(60).token_ids)
    own = models.save(tmp_path / "own")
    with _engine(_load(own)) as engine:
        answers.append(engine.submit(_chat()).result(60).token_ids)
    assert 1 == len(set(answers))


def test_a_template_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path):
    """Neither Jinja nor a file."""
    with pytest.raises(ConfigError, match=r"chat_template='no/such\.jinja' is neither"):
        _load(tmp_path / "no model", chat_template="no/such.jinja")


def test_a_template_changes_no_fingerprint(models, tmp_path):
    """KV hangs on token ids; another wording of prompts is no other model (K2)."""
    folder = models.save(tmp_path)
    assert _load(folder).fingerprint == _load(folder, chat_template=models.STRICT).fingerprint


# -- end tokens (M6), suggestions (M7)


def test_without_end_tokens_an_answer_ends_by_length_only(models, tmp_path):
    """No source names one: id 0 is no end token either (M6)."""
    folder = models.save(tmp_path)
    for name in ("config.json", "generation_config.json"):
        models.edit(folder, name, eos_token_id=None)
    models.edit(folder, "tokenizer_config.json", eos_token=None)
    models.edit(folder, "config.json", eos_token_id=None)
    loaded = _load(folder)
    assert frozenset() == loaded.eos_ids
    with _engine(loaded) as engine:
        for prompt in ("one", "two", "three"):
            assert "length" == engine.submit(_raw(prompt, 30)).result(60).finish_reason


def test_each_end_token_ends_an_answer_and_a_bias_keeps_it_from_doing_so(models, tmp_path):
    """Whichever source named it; `logit_bias` of -100 is the way to ignore the end (M6)."""
    folder = models.save(tmp_path)
    prompt = "Now then"
    with _engine(_load(folder)) as engine:
        first = engine.submit(_raw(prompt, 6, logit_bias=((257, -100.0),))).result(60)
    third = first.token_ids[2]
    models.edit(folder, "generation_config.json", eos_token_id=[257, third])
    loaded = _load(folder)
    assert {257, third} == loaded.eos_ids
    with _engine(loaded) as engine:
        ended = engine.submit(_raw(prompt, 6)).result(60)
        ends = [index for index, id_ in enumerate(first.token_ids) if id_ == third]
        assert ("stop", ends[0] + 1) == (ended.finish_reason, len(ended.token_ids))
        bias = tuple((id_, -100.0) for id_ in loaded.eos_ids)
        assert "length" == engine.submit(_raw(prompt, 6, logit_bias=bias)).result(60).finish_reason


def test_suggested_sampling_is_shown_and_never_applied_unasked(models, tmp_path):
    """generation_config's temperature and penalty are the model's; a call without parameters is greedy (M7)."""
    folder = models.save(tmp_path)
    with _engine(_load(folder)) as engine:
        plain = engine.submit(_raw("Hello", 12)).result(60).token_ids
    models.edit(folder, "generation_config.json", do_sample=True, temperature=1.0, top_p=0.9, repetition_penalty=5.0)
    loaded = _load(folder)
    assert {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 5.0} == dict(loaded.suggested)
    with _engine(loaded) as engine:
        assert dict(loaded.suggested) == engine.stats()["model"]["suggested_sampling"]
        json.dumps(engine.stats())
        assert plain == engine.submit(_raw("Hello", 12)).result(60).token_ids
        assert plain == engine.submit(_raw("Hello", 12, temperature=0.0)).result(60).token_ids


def test_what_is_no_number_is_no_suggestion(tmp_path):
    """They go into a header of every answer: a model's folder must not write what it likes there."""
    odd = {"do_sample": True, "temperature": "x" * 100_000, "top_p": float("nan"), "top_k": 10**400, "min_p": [0.1]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**odd, "repetition_penalty": 1.1}))
    assert {"do_sample": True, "repetition_penalty": 1.1} == suggestions_in(tmp_path)


def test_every_answer_says_how_it_was_chosen_and_what_the_makers_suggest(models, tmp_path):
    """In LangChain's response metadata and in a header of every door; an explicit temperature of 0 is what is used (M7)."""
    folder = models.save(tmp_path)
    models.edit(folder, "generation_config.json", do_sample=True, temperature=1.0, repetition_penalty=5.0)
    suggested = {"do_sample": True, "temperature": 1.0, "repetition_penalty": 5.0}
    greedy = {"temperature": 0.0, "top_p": 1.0, "suggested": suggested}
    with AgentKV.with_engine(_engine(_load(folder)), host=LangGraphHost(), ledger="memory", context=None) as kv:
        plain = ChatAgentKV(kv, max_tokens=2)
        warm = ChatAgentKV(kv, max_tokens=2, temperature=0.5, top_p=0.9, seed=0)
        assert greedy == plain.invoke("Hi").response_metadata["agentkv"]["sampling"]
        whole = sum(list(plain.stream("Hi", temperature=0.0))[1:], start=AIMessageChunk(content=""))
        assert greedy == whole.response_metadata["agentkv"]["sampling"]
        told = asyncio.run(warm.ainvoke("Hi")).response_metadata["agentkv"]["sampling"]
        assert {"temperature": 0.5, "top_p": 0.9, "seed": 0, "suggested": suggested} == told
        client = kv.openai()
        ask = {"model": kv.engine.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for body, used in (({}, 1.0), ({"temperature": 0}, 0.0), ({"stream": True}, 1.0)):
            answer = client.chat.completions.with_raw_response.create(**ask, **body)
            answer.http_response.read()
            assert {**greedy, "temperature": used} == json.loads(answer.headers["x-agentkv-sampling"])
        made = client.responses.with_raw_response.create(
            model=kv.engine.model, input="Hi", max_output_tokens=2, top_p=0.5
        )
        assert {"temperature": 1.0, "top_p": 0.5, "suggested": suggested} == json.loads(
            made.headers["x-agentkv-sampling"]
        )


# -- heads (M11), padding


def test_a_tied_model_that_brings_a_head_all_the_same_computes_what_transformers_does(models, tmp_path):
    """The embedding is the head (M11)."""
    from safetensors.torch import load_file, save_file

    folder = models.save(tmp_path, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, oracle = _load(folder), models.Oracle(folder)
    ids = list(loaded.tokenizer("Hello there")["input_ids"])
    with _engine(loaded) as engine:
        assert oracle.greedy(ids, 10) == list(engine.submit(_raw("Hello there", 10)).result(60).token_ids)


def test_an_untied_model_without_a_head_is_refused(models, tmp_path):
    """transformers would make one up (M11)."""
    from safetensors.torch import load_file, save_file

    folder = models.save(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, for instance lm_head\.weight"):
        _load(folder)


def test_weights_of_another_shape_are_refused(models, tmp_path):
    """A config of another model of the family (M5)."""
    folder = models.save(tmp_path)
    models.edit(folder, "config.json", intermediate_size=80)
    with pytest.raises(ModelError, match="mlp"):
        _load(folder)


def test_padding_of_the_vocabulary_is_never_written(models, tmp_path):
    """Its rows are numbers like any other, but no token stands behind them."""
    folder = models.save(tmp_path, vocab_size=320)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][259:] = 3 * weights["lm_head.weight"][:61]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, oracle = _load(folder), models.Oracle(folder)
    assert 259 == loaded.vocabulary
    ids = list(loaded.tokenizer("Hello there")["input_ids"])
    assert max(oracle.greedy(ids, 20)) >= 259  # the control: left alone, it writes padding
    with _engine(loaded) as engine:
        answer = engine.submit(_raw("Hello there", 20)).result(60)
        assert max(answer.token_ids) < 259
        sampled = engine.submit(_raw("Hello there", 40, temperature=5.0, seed=1)).result(60)
        assert max(sampled.token_ids) < 259
        with pytest.raises(RequestInvalid, match="forced_ids"):
            engine.submit(Request(prompt="x", forced_ids=(300,), caller=Caller(task="f")))


def test_a_token_without_a_row_is_a_refusal_of_that_call_only(models, tmp_path):
    """Some published tokenizers have more tokens than their model; looked up, they would crash a whole batch (E19)."""
    folder = models.save(tmp_path, vocab_size=258, eos_token_id=257, pad_token_id=257)
    loaded = _load(folder)
    assert {258} == loaded.unknown
    with _engine(loaded) as engine:
        running = engine.submit(_raw("A good long one", 40))
        with pytest.raises(RequestInvalid, match="a token that the tokenizer"):
            engine.submit(_raw("bad <|endoftext|> one"))
        assert running.result(60).token_ids
        assert engine.submit(_raw("good one")).result(60).token_ids


# -- types (M14)


@pytest.mark.parametrize(
    "policy",
    [
        (False, "auto", "float32", "stored as bfloat16; this CPU does not multiply bfloat16 in hardware"),
        (True, "auto", "bfloat16", "stored as bfloat16; this CPU multiplies bfloat16 in hardware"),
        (False, "bfloat16", "bfloat16", "expect it to be many times slower than float32"),
        (True, "float16", "float16", "expect it to be many times slower than float32"),
        (True, "bfloat16", "bfloat16", "as asked, stored as bfloat16"),
        (False, "float32", "float32", "as asked, stored as bfloat16"),
    ],
)  # fmt: skip
def test_the_chosen_type_is_told_with_the_reason(models, tmp_path, monkeypatch, policy):
    """Half precision on a CPU without the hardware is an order of magnitude slower and looks like a hang (M14)."""
    hardware, asked, chosen, told = policy
    folder = models.save(tmp_path)
    models.edit(folder, "config.json", dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": hardware})
    said = []
    loaded = _load(folder, asked, progress=said.append)
    assert chosen == loaded.geometry.dtype
    assert {chosen} == {dtypes.name_of(parameter.dtype) for parameter in loaded.model.parameters()}
    (line,) = [line for line in said if line.startswith("loading")]
    assert f"as {chosen} on cpu" in line
    assert told in line
    assert ("slower" in told) == ("slower" in line)


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("int8", "bfloat16")],
)
def test_on_cuda_the_checkpoints_own_type_is_taken(models, stored, chosen):
    """Or bfloat16 where that is no type to compute in."""
    config = models.config()
    config.dtype = getattr(torch, stored)
    assert chosen == dtypes.name_of(dtypes.dtype_of("auto", torch.device("cuda:0"), config)[0])


# -- identity (K2)


def test_the_fingerprint_covers_blocks_and_geometry(models, tmp_path, monkeypatch):
    """Besides weights, tokenizer, config and type, which have their own tests."""
    from dataclasses import replace

    folder = models.save(tmp_path)
    geometry = _load(folder).geometry
    prints = {identity.fingerprint(folder, geometry), identity.fingerprint(folder, replace(geometry, kv_heads=4))}
    monkeypatch.setattr(identity, "BLOCK_TOKENS", 32)
    prints.add(identity.fingerprint(folder, geometry))
    (folder / "added_tokens.json").write_text('{"<x>": 258}')
    prints.add(identity.fingerprint(folder, geometry))
    assert 4 == len(prints)
    monkeypatch.undo()
    (folder / "added_tokens.json").unlink()
    (folder / "README.md").write_text("no matter")
    assert identity.fingerprint(folder, geometry) in prints


# -- quantised checkpoints


@pytest.mark.parametrize(
    ("method", "wanted"),
    [("awq", "gptqmodel"), ("gptq", "gptqmodel"), ("bitsandbytes", "bitsandbytes"), ("torchao", "torchao")],
)
def test_a_quantised_checkpoint_names_the_package_that_it_needs(models, tmp_path, monkeypatch, method, wanted):
    """Before a weight is read, as a pip command."""
    folder = models.save(tmp_path)
    models.edit(folder, "config.json", quantization_config={"quant_method": method, "load_in_8bit": True, "bits": 4})
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ExtraMissing, match=rf"quantised with {method}, .* pip install {wanted}"):
        _load(folder)


def test_a_quantisation_that_nobody_tried_is_refused(models, tmp_path):
    """With those that are known."""
    folder = models.save(tmp_path)
    models.edit(folder, "config.json", quantization_config={"quant_method": "vptq"})
    with pytest.raises(UnsupportedModel, match="quantised with vptq, which is not known here; known are awq"):
        _load(folder)


def _answers_as_transformers(models, folder, loaded):
    """Greedy tokens of the engine against transformers' own cacheless forward of the same quantised model."""
    own = models.Oracle(folder, device_map={"": "cpu"})
    out = own.greedy(list(loaded.tokenizer("Hello there, you")["input_ids"]), 12)
    with _engine(loaded) as engine:
        assert out == list(engine.submit(_raw("Hello there, you", 12)).result(60).token_ids)


@pytest.mark.filterwarnings("ignore")
def test_torchao_checkpoints_are_loaded_where_it_is_installed(models, tmp_path):
    """Weights of 8 bits, KV in float32; greedy tokens are transformers' own."""
    pytest.importorskip("torchao", reason="pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain = models.save(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map={"": "cpu"}
    )
    folder = tmp_path / "torchao"
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    said = []
    loaded = _load(folder, progress=said.append)
    assert any("weights quantised with torchao" in line for line in said)
    _answers_as_transformers(models, folder, loaded)


@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_checkpoints_are_loaded_where_it_is_installed(models, tmp_path):
    """Weights of 4 bits, KV in float32; greedy tokens are transformers' own."""
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = models.save(tmp_path / "plain", intermediate_size=128)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=options, device_map={"": "cpu"}
    )
    folder = tmp_path / "bnb"
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    _answers_as_transformers(models, folder, _load(folder))


def test_gpt_oss_as_published_is_unpacked_where_no_kernel_is(models, tmp_path):
    """Its experts are stored in mxfp4; on the CPU transformers makes plain numbers of them."""
    from safetensors.torch import load_file, save_file

    folder = models.save(tmp_path, "gpt-oss")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        shape = (experts, outer, inner // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    models.edit(folder, "config.json", quantization_config={"quant_method": "mxfp4"})
    _answers_as_transformers(models, folder, _load(folder))


# -- offline (M13)

_COUNTING = """
import json, socket, sys
attempts = []
def refuse(*args, **more):
    attempts.append(repr(args)[:200])
    raise OSError("no network")
socket.socket.connect = refuse
socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
socket.create_connection = refuse
from agentkv import AgentKV, Message, Request, Sampling
from typer.testing import CliRunner
from agentkv.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert CliRunner().invoke(app, ["doctor", "--model", sys.argv[1]]).exit_code == 0
with AgentKV.local(sys.argv[1], device="cpu", dtype="float32", device_memory="4MiB", host_memory="4MiB") as kv:
    with kv.task("t"):
        answer = kv.submit(Request(messages=(Message(role="user", content="hi"),), sampling=Sampling(max_tokens=4))).result(60)
    print(kv.report("t"), file=sys.stderr)
assert CliRunner().invoke(app, ["report"]).exit_code == 0
print(json.dumps([len(answer.token_ids), attempts]))
"""


def test_everything_works_without_a_single_connection_attempt(models, tmp_path):
    """Import, help, doctor, loading a folder, a chat and its bill, with no offline flag set: attempts are counted (M13)."""
    folder = models.save(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "AGENTKV_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-c", _COUNTING, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert done.stdout, done.stderr[-3000:]
    count, attempts = json.loads(done.stdout.splitlines()[-1])
    assert count > 0
    assert [] == attempts


def test_a_hub_name_under_the_offline_flag_makes_no_attempt_either(monkeypatch):
    """It is looked for in the cache only."""
    import socket

    from agentkv.errors import ModelNotFound

    attempts = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: attempts.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_more: attempts.append(args))
    with pytest.raises(ModelNotFound):
        _load("someone/a-model-that-is-not-here")
    assert [] == attempts
