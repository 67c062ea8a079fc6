# SPDX-License-Identifier: Apache-2.0
"""Checks and completes the chat template of a model that transcribes sounds.

Such a template writes the system's text, which is the context, and the sounds. It leaves out the user's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_ros.engine_directory.chat_template import ChatTemplate

WORDS = "hello"  # a text of the rendered conversations
# What a template lacks that writes no turns of the assistant: the one that the model continues. Its beginning
# names the language.
ASSISTANT_TURNS = (
    "{%- for m in messages if m.role == 'assistant' and not add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}"
    "{%- else -%}{%- for item in m.content if item.type == 'text' -%}{{- item.text -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
)


def complete_speech_template(where: str, text: str, tokens: Mapping[str, str]) -> tuple[str, str]:
    """Return a template that writes context, sounds and the beginning of an answer.

    where: its file, for errors; text: as the checkpoint has it, to which turns of the assistant are added if
    it writes none; tokens: special tokens. Also returns the prompt of a sound with context. ValueError for a
    template that leaves out the context, or that writes another beginning of the answer than given.
    """
    sound: dict[str, Any] = {"role": "user", "content": [{"type": "audio"}]}
    asked = [{"role": "system", "content": WORDS}, sound]
    prompt = ChatTemplate.of(where, text, tokens).render(asked)
    if WORDS not in prompt:
        raise ValueError(f"{where}: a chat template that leaves out the system's text, which is the context")
    begun = [*asked, {"role": "assistant", "content": WORDS}]
    for whole in (text, text + ASSISTANT_TURNS):
        try:
            continued = ChatTemplate.of(where, whole, tokens).render(begun, continue_final_message=True)
        except ValueError:
            continue
        if continued == prompt + WORDS:
            return whole, prompt
    raise ValueError(f"{where}: a chat template that writes another beginning of the answer than is given")
