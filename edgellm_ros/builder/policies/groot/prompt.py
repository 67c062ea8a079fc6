# SPDX-License-Identifier: Apache-2.0
"""What the chat template of GR00T puts around images and task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from edgellm_ros.builder.checkpoint.checkpoint_config import read_section
from edgellm_ros.builder.config.prompt_files import (
    TOKENIZER_FILE,
    chat_template,
    check_vocabulary,
    read_tokenizer,
    template_tokens,
)
from edgellm_ros.builder.config.vocabulary_files import VOCABULARY_FILE, tokenizer_of_files
from edgellm_ros.builder.policies.groot.version import Version
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.tokenizer_file import named_errors

TASK = "place the task here"  # a text that no template has
QWEN_IMAGE = "<|image_pad|>"  # the image's token of Qwen3-VL's processor
NUMBERED = re.compile(r"<image-(\d+)>")  # what Eagle's template writes for an image


class Prompt(NamedTuple):
    """The tokens of a prompt without its task, and without the rows of images."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    # of each image: how many tokens of `before` precede it, or of `after` if images follow the task
    image_places: tuple[int, ...]
    task_before: str  # text between the task and the nearest special tokens, which its tokens depend on
    task_after: str


class GrootTokenizer(NamedTuple):
    """The tokenizer of a vision language model."""

    path: Path  # that errors name
    tokenizer: Tokenizer
    contents: bytes  # of tokenizer.json


def groot_tokenizer(folder: Path, vocab_size: int) -> GrootTokenizer:
    """Read a tokenizer from `tokenizer.json`, or else from its vocabulary.

    FileNotFoundError, or ValueError, which names the file.
    """
    path, vocabulary = folder / TOKENIZER_FILE, folder / VOCABULARY_FILE
    if path.is_file() or not vocabulary.is_file():
        tokenizer = read_tokenizer(path, vocab_size)
        return GrootTokenizer(path, tokenizer, path.read_bytes())
    tokenizer = tokenizer_of_files(folder)
    check_vocabulary(tokenizer, vocabulary, vocab_size)
    return GrootTokenizer(vocabulary, tokenizer, tokenizer.to_str().encode())


def read_prompt(folder: Path, version: Version, images: int, words: GrootTokenizer) -> Prompt:
    """Render the conversation of images and a task, as one message of the user.

    folder: of the vision language model. ValueError, which names the file, for a template that does not
    render images on the version's side of the task, each after another token.
    """
    image_token = _image_token(folder, version, words)
    source, text = chat_template(folder)
    template = ChatTemplate.of(str(source), text, template_tokens(folder))
    content = [*[{"type": "image"}] * images, {"type": "text", "text": TASK}]
    if version.images_last:
        content = [content[-1], *content[:-1]]
    rendered = template.render([{"role": "user", "content": content}], generation_prompt=False)
    if version.numbered_images:
        rendered = _with_image_tokens(folder, rendered)
    before, found, after = rendered.partition(TASK)
    special = [token.content for token in words.tokenizer.get_added_tokens_decoder().values()]
    first = max((end for each in special if (end := before.rfind(each) + len(each)) >= len(each)), default=0)
    last = min((start for each in special if (start := after.find(each)) >= 0), default=len(after))
    with named_errors(words.path, "a tokenizer that cannot encode text"):
        sides = [
            list(words.tokenizer.encode(part, add_special_tokens=False).ids)
            for part in (before[:first], after[last:])
        ]
    side = sides[1] if version.images_last else sides[0]
    places = [
        i - number for number, i in enumerate(i for i, token in enumerate(side) if token == image_token)
    ]
    kept, others = ([token for token in each if token != image_token] for each in sides)
    lost = sum(map(len, sides)) - len(kept) - len(others)
    if not found or len(places) != images or lost != images or sorted({0, *places}) != [0, *places]:
        where = "after" if version.images_last else "before"
        raise ValueError(
            f"{source}: a chat template without the task, or without an image token {image_token} for each "
            f"image {where} the task and after another token"
        )
    return Prompt(tuple(kept), tuple(others), tuple(places), before[first:], after[:last])


def _image_token(folder: Path, version: Version, words: GrootTokenizer) -> int:
    """Read the token of an image, which must be the one that the processor writes."""
    text = _image_texts(folder)[1] if version.numbered_images else QWEN_IMAGE
    section, written = read_section(folder / "config.json"), words.tokenizer.token_to_id(text)
    if section.integer(version.image_token) != written:
        raise section.fail(version.image_token, f"expected that of {text} in {words.path.name}, {written}")
    return written


def _with_image_tokens(folder: Path, rendered: str) -> str:
    """Replace placeholders by tokens of images of one row, as Eagle's processor."""
    texts = "".join(_image_texts(folder))
    return NUMBERED.sub(lambda found: f"<image {found[1]}>{texts}", rendered)


def _image_texts(folder: Path) -> list[str]:
    """Read the tokens that Eagle's processor writes for an image: start, row and end."""
    settings = read_section(folder / "processor_config.json")
    settings.one_of("image_placeholder", ["image"], default="image")
    defaults = {"image_start_token": "<img>", "image_token": "<IMG_CONTEXT>", "image_end_token": "</img>"}
    return [settings.text(key) if settings.has(key) else text for key, text in defaults.items()]
