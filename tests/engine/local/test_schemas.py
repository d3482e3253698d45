"""What a model is held to is never wider than what was asked for, and has an end."""

import pytest

from agentkv.engine.local.schemas import closed, finite


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "integer"}, {"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1}),
        ({"type": "integer", "minimum": 3}, {"type": "integer", "minimum": 3, "maximum": 2**53 - 1}),
        ({"type": "integer", "minimum": 10**30}, {"type": "integer", "minimum": 10**30}),
        ({"type": "number", "maximum": 7}, {"type": "number", "maximum": 7, "multipleOf": 1e-9}),
        ({"type": "number", "maximum": 1e12}, {"type": "number", "maximum": 1e12}),
        ({"type": "number", "multipleOf": 0.5}, {"type": "number", "multipleOf": 0.5}),
        ({"type": "string"}, {"type": "string"}),
        ({"enum": [1.5]}, {"enum": [1.5]}),
        (True, True),
    ],
)
def test_numbers_have_an_end(schema, made):
    """Where nobody gave them one, and where it can be held."""
    assert made == finite(schema)
    assert {"anyOf": [made, {"items": made}]} == finite({"anyOf": [schema, {"items": schema}]})


def test_what_was_given_is_left_alone():
    """The caller's own schema is not changed."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert finite(schema) != closed(schema)
    assert {"type": "object", "properties": {"a": {"type": "integer"}}} == schema


def test_objects_that_name_fields_are_closed():
    """Deep inside too, unless they say that others may come or are put together from several."""
    inner = {"type": "object", "properties": {"b": {}}}
    shut = inner | {"additionalProperties": False}
    assert {"properties": {"a": shut}, "additionalProperties": False} == closed({"properties": {"a": inner}})
    for how in ({"additionalProperties": True}, {"patternProperties": {"x": {}}}, {"allOf": [{}]}, {"$ref": "#"}):
        assert inner | how == closed(inner | how)
    assert {"type": "object"} == closed({"type": "object"})
    assert {"properties": {}, "additionalProperties": False} == closed({"properties": {}})  # it takes no arguments
