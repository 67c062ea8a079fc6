# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's own chat template, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A `chat_template.jinja`, with the settings and helpers that Hugging Face templates rely on."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise FileNotFoundError(f"{path} not found")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(self._path.read_text(encoding="utf-8"))
        except (jinja2.TemplateError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a Jinja template: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text up to where the assistant's answer begins.

        ValueError with what the template complains about.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except Exception as error:  # a template's expressions may raise anything
            raise ValueError(f"{self._path}: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
