# SPDX-License-Identifier: Apache-2.0
"""ChatTemplate: renders the checkpoint's chat template as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from edgellm_ros.echo import printable
from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE
from edgellm_ros.engine_directory.schema import read_json

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning
END_MARK = "END_OF_THE_FINAL_MESSAGE "  # templates that trim texts remove its space


class ChatTemplate:
    """A `chat_template.jinja`.

    Filters, functions, extensions and variables are the same as in transformers 5.23
    (`utils/chat_template_utils.py`). A template is code that comes with a checkpoint, so it runs in a sandbox
    and sees plain JSON values only. Variables such as `bos_token` and `eos_token` come from the file
    `special_tokens_map.json` beside the template; without that file they are undefined.
    FileNotFoundError, or ValueError for a file that is not a template or not a map of names to strings.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{path} not found")
        tokens = read_special_tokens(file.with_name(SPECIAL_TOKENS_FILE))
        self._compile(str(path), read_template(file), tokens)

    @classmethod
    def of(cls, where: str, text: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Make the template of a text.

        where: its file, for errors. ValueError as for a file.
        """
        template = cls.__new__(cls)
        template._compile(where, text, special_tokens)
        return template

    def _compile(self, where: str, text: str, special_tokens: Mapping[str, str]) -> None:
        self.where = where
        self.reads_clock = "strftime_now" in text  # so that equal messages may become other texts
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["dict"] = _MakeDict()
        environment.globals["namespace"] = _PublicNamespace
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **special_tokens}
        try:
            self._template = environment.from_string(text)
        except Exception as error:  # also of Python's compiler, for blocks that are nested too deep
            raise ValueError(f"{where}: not a Jinja template: {printable(str(error))}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text of the prompt, which ends where the assistant's answer begins.

        `variables`: further ones, such as tools and enable_thinking. Without `generation_prompt` the prompt
        ends after the last message. With `continue_final_message` the prompt ends with the last text of the
        last message. ValueError with the template's own error message, or if the template changes this last
        text.
        """
        plain = [_message(message) for message in messages]
        last_text = _mark_end(plain) if continue_final_message else ""
        given = _plain({**self._variables, **(variables or {})})
        prompt = {
            "messages": plain,
            "add_generation_prompt": generation_prompt and not continue_final_message,
        }
        try:
            text = self._template.render({**given, **prompt})
        except Exception as error:  # a template's expressions may raise anything
            raise ValueError(f"{self.where}: {printable(str(error))}") from error
        if not continue_final_message:
            return text
        end = text.rfind(END_MARK.strip())
        if end < 0 or last_text.strip() not in text[:end]:
            raise ValueError(f"{self.where} changes the text of the last message, so nothing can continue it")
        return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without absent values.

    The reasoning is there under each name that templates read.
    """
    plain = {name: _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Rebuild a value of JSON types; other objects become names.

    A template could call the methods of such objects.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # a subclass, such as an Enum, may have further methods
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Add END_MARK to the last text of the last message; return this text without it."""
    last = messages[-1]
    if isinstance(last["content"], str):
        text: str = last["content"]
        last["content"] += END_MARK
    else:
        part = next(part for part in reversed(last["content"]) if "text" in part)
        text = part["text"]
        part["text"] += END_MARK
    return text


def read_template(path: Path) -> str:
    """Read the text of a template.

    ValueError if the text is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a chat template that is not UTF-8: {error}") from None


def read_special_tokens(path: Path) -> dict[str, str]:
    """Read special_tokens_map.json, such as `bos_token`; {} without the file.

    ValueError for a value that is no string.
    """
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


class _MakeDict:
    """The function `dict` of templates.

    The class itself has methods that lead out of the sandbox.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PublicNamespace(Namespace):
    """The `namespace` of templates, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the names
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it begins with an underscore")


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
