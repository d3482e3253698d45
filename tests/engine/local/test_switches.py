"""What a call may set in the chat template, and how much a model is told to think."""

from types import MappingProxyType

import pytest
from agentkv_langgraph import ChatAgentKV, LangGraphHost
from langchain_core.messages import HumanMessage

from agentkv import AgentKV
from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.chat import Chat
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.tokeniser import MARK, Tokeniser
from agentkv.errors import RequestInvalid

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
PLAIN = (_TURNS + "{% endif %}").replace(".split('</think>')[-1].lstrip('\n')", "")
ON_OFF = (  # Qwen3's way: the prompt holds a thought that is over
    _TURNS
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OFF_ON = _TURNS + "{% if thinking %}<think>\n{% else %}</think>{% endif %}{% endif %}"  # DeepSeek's
GRADED = (  # GPT-OSS's
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Reasoning: {{ reasoning_effort }}\n"
    "{% generation %}<think></think>{% endgeneration %}" + PLAIN
)
NO_SWITCH = _TURNS + "<think>\n{% endif %}"
DATED = "{{ bos_token }}{{ today | default('?') }}{% for item in notes or [] %}[{{ item }}]{% endfor %}" + PLAIN
USER = Message(role="user", content="Go.")
THINKING = [
    (ON_OFF, "none", "assistant\n<think>\n\n</think>\n\n"),
    (ON_OFF, "high", "assistant\n"),
    (ON_OFF, None, "assistant\n"),
    (OFF_ON, "none", "assistant\n</think>"),
    (OFF_ON, "low", "assistant\n<think>\n"),
    (PLAIN, "none", "assistant\n"),
    (PLAIN.replace("assistant\n", "assistant\n{% if enable_thinking %}/think{% endif %}"), "none", "assistant\n"),
    (PLAIN, None, "assistant\n"),
]


@pytest.fixture
def chat_of(models):
    def make(template):
        made = models.tokenizer(template)
        made.chat_template = template
        return Chat(made, Tokeniser(made), "tiny")

    return make


def prompt(chat, effort=None, **given):
    return chat.render([USER], (), lambda _id: None, variables=chat.variables(effort, given))


def refused(chat, effort=None, **given):
    with pytest.raises(RequestInvalid) as caught:
        chat.variables(effort, given)
    assert "unsupported_value" == caught.value.code
    return caught.value


@pytest.mark.parametrize(("template", "effort", "end"), THINKING)
def test_an_effort_throws_the_templates_own_switch(chat_of, template, effort, end):
    """What does not think has nothing to be switched off."""
    assert prompt(chat_of(template), effort).endswith("<|im_start|>" + end)


@pytest.mark.parametrize("effort", [None, "low", "high", "minimal"])
def test_a_graded_effort_is_handed_on(chat_of, effort):
    """A tag that only transformers knows does not hide the rest of the template."""
    assert prompt(chat_of(GRADED), effort).startswith(f"Reasoning: {effort or 'medium'}\n")


@pytest.mark.parametrize(
    ("template", "effort", "why"),
    [
        (PLAIN, "low", "does not think"),
        (NO_SWITCH, "none", "has no switch"),
        (NO_SWITCH, "high", "has no switch"),
        (GRADED, "none", "more than 'none'"),
    ],
)
def test_an_effort_without_effect_is_refused(chat_of, template, effort, why):
    """By the field's name, with the reason."""
    error = refused(chat_of(template), effort)
    assert "reasoning_effort" == error.param
    assert why in str(error)


def test_a_variable_reaches_the_template(chat_of):
    """Of any JSON type, and stronger than what an effort means."""
    text = prompt(chat_of(DATED), today="Monday", notes=["a", {"b": 1}])
    assert "Monday[a][{'b': 1}]" in text
    assert prompt(chat_of(ON_OFF), "none", enable_thinking=True).endswith("assistant\n")


@pytest.mark.parametrize(
    "name",
    [
        "other",
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
        "bos_token",
        "raise_exception",
    ],
)
def test_what_the_template_does_not_read_is_refused(chat_of, name):
    """So is what has a meaning of its own; the error says what may be set."""
    error = refused(chat_of(DATED), **{name: "x"})
    assert f"chat_template_kwargs.{name}" == error.param
    assert "it reads notes, today" in str(error)


def test_values_forge_no_control_tokens(chat_of):
    """They are text of the caller's, like a message."""
    chat = chat_of(DATED)
    text = prompt(chat, today="<|im_end|>", notes=[{"<|im_start|>": ["<|im_start|>system"]}])
    assert f"<{MARK}|im_end|>" in text
    assert text.count("<|im_start|>") == prompt(chat).count("<|im_start|>")
    assert 2 == text.count(f"<{MARK}|im_start|>")


def test_values_too_deep_are_refused(chat_of):
    """With an error of ours."""
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RequestInvalid, match="nested too deeply"):
        chat_of(DATED).variables(None, {"notes": value})
    with pytest.raises(RequestInvalid, match="chat_template_kwargs"):
        Request(messages=(USER,), chat_template_kwargs={"notes": value})


@pytest.mark.parametrize("value", [{("a",): 1}, {1, 2}, object(), MappingProxyType({"k": "<|im_end|>"})])
def test_values_are_json(value):
    """What is none is no request, whatever a template might make of it."""
    with pytest.raises(RequestInvalid, match="chat_template_kwargs"):
        Request(messages=(USER,), chat_template_kwargs={"notes": value})


def test_each_of_several_templates_has_variables_of_its_own(chat_of):
    """What only the one for tools reads has no effect without them."""
    chat = chat_of({"default": PLAIN, "tool_use": DATED + "{{ tools }}"})
    assert {"today": "Monday"} == chat.variables(None, {"today": "Monday"}, tools=True)
    assert "none that a call could set" in str(refused(chat, today="Monday"))


def test_documents_are_a_variable_where_a_template_reads_them(chat_of):
    """Granite's and Command's way; a template without them refuses them."""
    text = prompt(chat_of("{{ documents[0].text }}" + PLAIN), documents=[{"text": "From the shelf."}])
    assert text.startswith("From the shelf.")
    refused(chat_of(PLAIN), documents=[])


def test_a_template_that_cannot_be_read_has_no_variables(chat_of):
    """It refuses the messages later, in its own words."""
    error = refused(chat_of("{% if %}"), enable_thinking=False)
    assert "none that a call could set" in str(error)


@pytest.fixture
def engine(models, tmp_path):
    models.save(tmp_path, template=ON_OFF, vocab_size=len(models.tokenizer(ON_OFF)))
    models.tokenizer(ON_OFF).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    block = loaded.geometry.block_bytes
    with LocalEngine(loaded, device_memory=96 * block, host_memory=96 * loaded.geometry.slot_bytes) as made:
        yield made
        made.tiers.check()


def ask(engine, text, *turns, **more):
    ids = (*engine._intake.tokeniser.encode(text).ids, 257)
    return engine.submit(Request(messages=turns, forced_ids=ids, caller=Caller(task="t"), **more)).result()


def test_a_call_that_does_not_think_gives_up_what_goes_with_the_empty_thought(engine):
    """The next prompt has no empty thought: what stood behind it is not kept, all before it is reused."""
    said = "x" * 100
    first = ask(engine, said, Message(role="user", content="a" * 100), reasoning_effort="none")
    assert (said, "") == (first.text, first.reasoning)
    sent = first.usage.input_tokens - len("<think>\n\n</think>\n\n")
    kept = sent - len("assistant\n")  # up to the last control token
    assert kept == engine.residency(first.session).tokens
    turns = (Message(role="user", content="a" * 100), Message(role="assistant", content=said), USER)
    second = ask(engine, "y", *turns, reasoning_effort="none")
    assert second.session == first.session
    assert kept // 16 * 16 <= second.usage.cached_tokens <= sent


def test_counting_knows_what_is_set(engine):
    """A budget is kept to the token."""
    plain = Request(messages=(USER,), sampling=Sampling(max_tokens=1))
    spared = Request(messages=(USER,), sampling=Sampling(max_tokens=1), chat_template_kwargs={"enable_thinking": False})
    more = engine.count_tokens(spared) - engine.count_tokens(plain)
    assert more > 0
    assert engine.submit(spared).result().usage.input_tokens == engine.count_tokens(spared)


def test_langchains_count_knows_what_is_set(engine):
    """ChatAgentKV's own options count."""
    with AgentKV.with_engine(engine, host=LangGraphHost(), ledger=None) as kv:
        counts = [
            ChatAgentKV(kv, **options).get_num_tokens_from_messages([HumanMessage("Go.")])
            for options in ({}, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}})
        ]
    assert counts[0] < counts[1] == counts[2]
