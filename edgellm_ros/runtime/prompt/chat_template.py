# SPDX-License-Identifier: Apache-2.0
"""ChatTemplate: renders the checkpoint's chat template as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE
from edgellm_ros.engine_directory.schema import read_json


class ChatTemplate:
    """A `chat_template.jinja`.

    Filters, functions, extensions and variables are the same as in transformers 5.23
    (`utils/chat_template_utils.py`). Variables such as `bos_token` and `eos_token` come from the file
    `special_tokens_map.json` beside the template; without that file they are undefined.
    FileNotFoundError, or ValueError for a file that is not a template or not a map of names to strings.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise FileNotFoundError(f"{path} not found")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        special_tokens = _read_special_tokens(self._path.with_name(SPECIAL_TOKENS_FILE))
        self._variables = {"tools": None, "documents": None, **special_tokens}
        try:
            self._template = environment.from_string(self._path.read_text(encoding="utf-8"))
        except (jinja2.TemplateError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a Jinja template: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Return the text of the prompt, which ends where the assistant's answer begins.

        `variables`: further ones, such as tools and enable_thinking. ValueError with the template's own error
        message.
        """
        given = {**self._variables, **(variables or {})}
        try:
            return self._template.render({**given, "messages": messages, "add_generation_prompt": True})
        except Exception as error:  # a template's expressions may raise anything
            raise ValueError(f"{self._path}: {error}") from error


def _read_special_tokens(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    tokens = read_json(path)
    for name, value in tokens.items():
        if not isinstance(value, str):
            raise ValueError(f"{path}: {name} must be a string, got {value!r}")
    return tokens


class _GenerationBlock(Extension):
    """`{% generation %}` marks answers for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's own HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as in transformers
