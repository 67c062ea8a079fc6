# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of answers: their text, and the white space of the answers.

Answers are compact: a space may follow a comma or a colon, as in {"a": 1, "b": 2}, and no other white space
is between two symbols. The key `x-guidance` at the top of a schema changes that and other options of
llguidance, which compiles the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from edgellm_ros.echo import printable, quoted

COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
OPTIONS_KEY = "x-guidance"
# Options of llguidance; separators and white space are regular expressions.
OPTIONS: dict[str, type] = {
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "item_separator": str,
    "key_separator": str,
    "coerce_one_of": bool,
    "lenient": bool,
    "json_allowed_escapes": str,
    "json_allow_general_unicode_escapes": bool,
}
NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
DATA = ("const", "enum", "default", "examples")  # their values are no schemas
MOST_LEVELS = 120  # of objects and lists; the library reads a few more
TOO_DEEP = f"json_schema is nested too deep: at most {MOST_LEVELS} levels of objects and lists are taken"


def schema_text(schema: str | bool | Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON text; True is the schema of any JSON.

    ValueError for text that is not JSON, for JSON that is no schema, for options under `x-guidance` that are
    unknown, of another type or in a part of the schema, and for more than MOST_LEVELS levels.
    """
    if isinstance(schema, (Mapping, bool)):
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema is not JSON: {printable(str(error))}") from None
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
    elif isinstance(schema, str):
        text = schema
    else:
        raise ValueError(f"json_schema must be JSON text, a mapping or True, got {quoted(schema)}")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"json_schema {quoted(schema)} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if not isinstance(content, (dict, bool)):
        raise ValueError(f"json_schema must be an object or true, got {quoted(text)}")
    if content is False:
        raise ValueError("json_schema is false, which no answer can match")
    if _levels(content) > MOST_LEVELS:
        raise ValueError(TOO_DEEP)
    if isinstance(content, dict):
        _check_options(content)
    return text


def schema_grammar(library: Any, text: str) -> str:
    """Return a JSON schema as the library writes grammars.

    ValueError if the library cannot read the JSON.
    """
    try:
        schema = "{}" if text.strip() == "true" else text  # options belong to an object
        return str(library.LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT))
    except ValueError as error:
        raise ValueError(f"json_schema {quoted(text)} is not JSON: {printable(str(error))}") from None


def _check_options(schema: dict[str, Any]) -> None:
    name = f"json_schema: {OPTIONS_KEY}"
    options = schema.get(OPTIONS_KEY, {})
    if not isinstance(options, dict):
        raise ValueError(f"{name} must be an object, got {quoted(options)}")
    for key, value in options.items():
        if key not in OPTIONS:
            raise ValueError(f"{name} has the unknown key {quoted(key)}; known keys are {', '.join(OPTIONS)}")
        if not isinstance(value, OPTIONS[key]):
            kind = "a boolean" if OPTIONS[key] is bool else "a string"
            raise ValueError(f"{name}: {key} must be {kind}, got {quoted(value)}")
    if any(OPTIONS_KEY in part for part in _parts(schema)):
        raise ValueError(f"{name} is taken at the top of the schema only, found in a part of the schema")


def _levels(content: Any) -> int:
    """Count the levels of objects and lists, up to one more than are taken."""
    level, levels = [content], 0
    while level and levels <= MOST_LEVELS:
        inside = [each for each in level if isinstance(each, (dict, list))]
        level = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
        levels += bool(inside)
    return levels


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas inside a schema."""
    for key, value in schema.items():
        if key in DATA or key == OPTIONS_KEY:
            continue
        named = key in NAMED_SCHEMAS and isinstance(value, dict)
        found = value.values() if named else value if isinstance(value, list) else [value]
        for part in found:
            if isinstance(part, dict):
                yield part
                yield from _parts(part)
