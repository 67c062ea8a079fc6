# SPDX-License-Identifier: Apache-2.0
"""What the chat template of GR00T puts around images and task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edgellm_ros.builder.config.prompt_files import (
    TOKENIZER_FILE,
    chat_template,
    read_tokenizer,
    template_tokens,
)
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.tokenizer_file import named_errors

TASK = "place the task here"  # a text that no template has


class Prompt(NamedTuple):
    """The tokens of a prompt without its task, and without the rows of images."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    image_places: tuple[int, ...]  # of each image: how many tokens of `before` precede it


def read_prompt(folder: Path, images: int, image_token: int, vocab_size: int) -> Prompt:
    """Render the conversation of images and a task, as one message of the user.

    folder: of the vision language model. ValueError, which names the file, for a template that does not
    render images before the task, each after another token.
    """
    path = folder / TOKENIZER_FILE
    tokenizer = read_tokenizer(path, vocab_size)
    source, text = chat_template(folder)
    template = ChatTemplate.of(str(source), text, template_tokens(folder))
    content = [*[{"type": "image"}] * images, {"type": "text", "text": TASK}]
    rendered = template.render([{"role": "user", "content": content}], generation_prompt=False)
    before, found, after = rendered.partition(TASK)
    with named_errors(path, "a tokenizer that cannot encode text"):
        first, last = (list(tokenizer.encode(part, add_special_tokens=False).ids) for part in (before, after))
    kept: list[int] = []
    places: list[int] = []
    for token in first:
        if token == image_token:
            places.append(len(kept))
        else:
            kept.append(token)
    if not found or len(places) != images or image_token in last or sorted({0, *places}) != [0, *places]:
        raise ValueError(
            f"{source}: a chat template without the task, or without an image token {image_token} for each "
            "image before the task and after another token"
        )
    return Prompt(tuple(kept), tuple(last), tuple(places))
