# SPDX-License-Identifier: Apache-2.0
"""JSON schemas: which are taken, and the white space of their answers."""

import json

import jsonschema
import pytest

from edgellm_ros.runtime.grammar.grammar import Grammars
from edgellm_ros.runtime.request import SamplingParams
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.requests_for_tests import request

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": [2, 3]}
USUAL, DENSE, INDENTED = (
    json.dumps(VALUE),
    json.dumps(VALUE, separators=(",", ":")),
    json.dumps(VALUE, indent=2),
)
TWO_SPACES, BEFORE_COLON = '{"a":  1,"b":[2,3]}', '{"a" :1,"b":[2,3]}'


@pytest.fixture(scope="module")
def grammars(tiny_engine):
    tokenizer = Tokenizer(tiny_engine / "tokenizer.json")
    return Grammars(tokenizer, tokenizer.size, [0])


@pytest.fixture(scope="module")
def allows(grammars, tiny_engine):
    """A function that says whether an answer of a schema may be a text."""
    tokenizer = Tokenizer(tiny_engine / "tokenizer.json")

    def is_allowed(schema: object, text: str) -> bool:
        matcher = grammars.start(SamplingParams(json_schema=schema).grammar)
        for token in tokenizer.encode(text):
            matcher.accept(token)
        return matcher.is_complete()

    return is_allowed


@pytest.mark.parametrize("text", [USUAL, DENSE])
def test_a_space_may_follow_a_comma_and_a_colon(allows, text):
    assert allows(SCHEMA, text)


@pytest.mark.parametrize("text", [INDENTED, TWO_SPACES, BEFORE_COLON, " " + DENSE, '{ "a":1,"b":[2,3]}'])
def test_no_other_white_space_is_allowed(allows, text):
    assert not allows(SCHEMA, text)


@pytest.mark.parametrize(
    "options, allowed, excluded",
    [
        ({"whitespace_flexible": True}, [USUAL, DENSE, INDENTED, TWO_SPACES, BEFORE_COLON], []),
        ({"whitespace_pattern": " {1,2}"}, [USUAL, DENSE, TWO_SPACES, BEFORE_COLON], [INDENTED]),
        ({"item_separator": ",", "key_separator": ":"}, [DENSE], [USUAL]),
        ({"item_separator": ", ", "key_separator": ": "}, [USUAL], [DENSE]),
        ({}, [USUAL, DENSE], [INDENTED]),
    ],
)
def test_options_of_the_schema_set_the_white_space(allows, options, allowed, excluded):
    schema = {**SCHEMA, "x-guidance": options}
    assert [allows(schema, text) for text in allowed] == [True] * len(allowed)
    assert [allows(json.dumps(schema), text) for text in excluded] == [False] * len(excluded)


def test_options_that_are_not_about_white_space_leave_it_compact(allows):
    schema = {**SCHEMA, "x-guidance": {"lenient": True}, "unknownConstraint": 1}
    assert allows(schema, USUAL)
    assert not allows(schema, INDENTED)


@pytest.mark.parametrize("schema", [True, "true", {}, "{}", " {} "])
@pytest.mark.parametrize("text", ["3", '"a"', "[1, null]", '{"a": {"b": []}}'])
def test_true_and_an_empty_object_are_schemas_of_any_json(allows, schema, text):
    assert allows(schema, text)


def test_a_property_may_have_the_name_of_the_options(allows):
    schema = {"type": "object", "properties": {"x-guidance": {"enum": [{"x-guidance": 1}]}}}
    assert allows(schema, '{"x-guidance": {"x-guidance": 1}}')


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def nested_mapping(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


OPTIONS_ERROR = "json_schema: x-guidance"


@pytest.mark.parametrize(
    "schema, message",
    [
        ("{", "json_schema '{' is not JSON: Expecting property name"),
        (" ", "json_schema ' ' is not JSON: Expecting value"),
        ('{"a": NaN}', "json_schema .* is not JSON: expected value at line 1"),
        ('{"const": "\\ud800"}', "json_schema .* is not JSON: unexpected end of hex escape"),
        ('{"const": "\ud800"}', "json_schema .* is not JSON: Value is not JSON serializable"),
        ({"a": {1}}, "json_schema is not JSON: Object of type set"),
        (3, "json_schema must be JSON text, a mapping or True, got 3"),
        ([], r"json_schema must be JSON text, a mapping or True, got \[\]"),
        ("[]", r"json_schema must be an object or true, got '\[\]'"),
        ("3", "json_schema must be an object or true, got '3'"),
        ("null", "json_schema must be an object or true, got 'null'"),
        ('"true"', "json_schema must be an object or true, got '\"true\"'"),
        (False, "json_schema is false, which no answer can match"),
        (nested(120), "json_schema is nested too deep"),
        (nested(130), "json_schema is nested too deep"),
        (nested(900), "json_schema is nested too deep"),
        (nested(100_000), "json_schema is nested too deep"),
        (nested_mapping(130), "json_schema is nested too deep"),
        (nested_mapping(100_000), "json_schema is nested too deep"),
        ({"x-guidance": 3}, f"{OPTIONS_ERROR} must be an object, got 3"),
        ({"x-guidance": None}, f"{OPTIONS_ERROR} must be an object, got None"),
        (
            {"x-guidance": {"white": 1}},
            f"{OPTIONS_ERROR} has the unknown key 'white'; known keys are whitesp",
        ),
        ({"x-guidance": {"lenient": 1}}, f"{OPTIONS_ERROR}: lenient must be a boolean, got 1"),
        ({"x-guidance": {"item_separator": None}}, f"{OPTIONS_ERROR}: item_separator must be a string, got"),
        ({"x-guidance": {"whitespace_pattern": "("}}, "json_schema .* cannot be used: unclosed group"),
        ({"items": {"x-guidance": {}}}, f"{OPTIONS_ERROR} is taken at the top of the schema only"),
        ({"anyOf": [{}, {"x-guidance": {}}]}, f"{OPTIONS_ERROR} is taken at the top of the schema only"),
        (
            {"properties": {"a": {"x-guidance": {}}}},
            f"{OPTIONS_ERROR} is taken at the top of the schema only",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_a_bad_schema_is_refused_in_one_line_that_names_it(schema, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        SamplingParams(json_schema=schema)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_the_deepest_schema_that_is_taken_can_be_used(allows):
    assert allows(nested(119), "[[1]]")


@pytest.mark.slow
def test_a_hundred_answers_of_a_random_model_are_not_cut_for_white_space(runtime):
    """Random weights and a high temperature choose white space wherever it is allowed."""
    rules = {
        "json_schema": SCHEMA
        | {
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "array", "items": {"enum": ["left", "right"]}, "maxItems": 4},
            }
        },
        "max_tokens": 60,
        "temperature": 2.0,
    }
    answers = [runtime.handle_request(request(seed=seed, **rules)) for seed in range(100)]
    assert [answer.finish_reason for answer in answers] == ["stop"] * 100
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), rules["json_schema"])
