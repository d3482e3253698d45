"""Tool results under LangChain and LangGraph: what is slimmed, what is not, and reading the whole again."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import pytest
from agentkv_langgraph.outputs import read_output_tool, slim_tool_message
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command

from agentkv.context.outputs import Outputs
from agentkv.context.slim import Slimmer
from agentkv.context.tokens import estimate

LOG = "\n".join(f"step {n} of many: copied file-{n % 7}" for n in range(2000))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture
def slimmer() -> Slimmer:
    return Slimmer(outputs=Outputs(), count=estimate)


def message(content: Any, **options: Any) -> ToolMessage:
    return ToolMessage(**{"content": content, "tool_call_id": "call-1", "name": "bash", **options})


def test_text_parts_are_slimmed_and_nothing_else(slimmer):
    """Image, artifact, status, ids, name and metadata stay; the message that came in is not touched."""
    raw = message(
        [{"type": "text", "text": LOG}, IMAGE, {"type": "text", "text": "small", "index": 2}, LOG],
        artifact={"frame": [1, 2]}, status="error", id="m-1", additional_kwargs={"a": 1},
    )  # fmt: skip
    before = raw.model_copy(deep=True)
    slim = slim_tool_message(raw, slimmer)
    assert before == raw
    first, image, small, last = slim.content
    assert first["text"].startswith("step 0 of many")
    assert len(first["text"]) < 1000
    assert first["text"] == last
    assert raw.content[1] is image
    assert {"type": "text", "text": "small", "index": 2} == small
    same = {"artifact", "status", "tool_call_id", "name", "id", "additional_kwargs", "response_metadata", "type"}
    assert raw.model_dump(include=same) == slim.model_dump(include=same)


def test_a_command_is_slimmed_in_its_messages(slimmer):
    """Whether its update is a mapping or pairs; goto, graph and other keys stay."""
    command = Command(goto="b", update={"messages": [message(LOG), HumanMessage(LOG)], "seen": LOG})
    slim = slim_tool_message(command, slimmer)
    assert ("b", LOG) == (slim.goto, slim.update["seen"])
    assert len(slim.update["messages"][0].content) < 1000
    assert LOG == slim.update["messages"][1].content
    assert LOG == command.update["messages"][0].content
    pairs = slim_tool_message(Command(update=[("messages", [message(LOG)]), ("n", 1)]), slimmer)
    assert len(pairs.update[0][1][0].content) < 1000
    assert ("n", 1) == pairs.update[1]


@pytest.mark.parametrize(
    "result",
    [None, b"bytes", 7, "text", [], [None], {}, HumanMessage(LOG), Command(goto="x"), Command(update=None), message(""), message([]), message([IMAGE])],
    ids=repr,
)  # fmt: skip
def test_whatever_is_no_long_tool_text_comes_back_as_it_is(slimmer, result):
    """The same object."""
    assert result is slim_tool_message(result, slimmer)


def test_a_list_of_results_is_slimmed_each_for_itself(slimmer):
    """Two parallel results with empty ids keep their own text."""
    first, second = slim_tool_message(
        [message(LOG + "\na", tool_call_id=""), message(LOG + "\nb", tool_call_id="")], slimmer
    )
    handles = {text.content.rpartition('read_output("')[2].split('"')[0] for text in (first, second)}
    assert 2 == len(handles)
    assert {LOG + "\na", LOG + "\nb"} == {slimmer.outputs.raw(handle) for handle in handles}


def test_a_slimmed_text_comes_back_from_a_checkpoint_as_it_went(slimmer):
    """A lone surrogate is replaced on arrival, not silently by the serialiser."""
    slim = slim_tool_message(message("\ud800 " + LOG), slimmer)
    serde = JsonPlusSerializer()
    back = serde.loads_typed(serde.dumps_typed(slim))
    assert slim.content == back.content
    assert slim.content.startswith("\ufffd step 0")


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def test_a_graph_that_slims_in_its_tool_node_resumes_with_the_same_bytes(slimmer):
    """The state holds the slimmed text, and slimming it again on resume changes nothing."""

    def tools(_state: State) -> dict[str, Any]:
        return {"messages": [slim_tool_message(message(LOG), slimmer)]}

    graph = StateGraph(State).add_node("tools", tools).add_edge(START, "tools").compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    call = AIMessage("", tool_calls=[{"name": "bash", "args": {}, "id": "call-1"}])
    graph.invoke({"messages": [call]}, config)
    kept = graph.get_state(config).values["messages"][-1]
    assert kept is slim_tool_message(kept, slimmer)
    assert kept.content == slim_tool_message(message(LOG), slimmer).content


def test_the_tool_reads_an_output_again(slimmer):
    """It has a name, a description and described arguments, and answers what was left out."""
    tool = read_output_tool(slimmer.outputs)
    assert "read_output" == tool.name
    assert {"handle", "lines", "pattern"} == set(tool.args)
    assert all(argument["description"] for argument in tool.args.values())
    handle = slimmer.slim(LOG).handle
    assert "1501: step 1500 of many: copied file-2" == tool.invoke({"handle": handle, "lines": "1501"})


def test_an_agentkv_gives_the_tool_too(make_kv):
    """For the outputs that it keeps."""
    tool = read_output_tool(make_kv(ledger=None))
    assert "No output has the handle" in tool.invoke({"handle": "x"})
