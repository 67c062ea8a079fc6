# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the tokenizer and the chat template of a checkpoint.

Both come from other programs, and their errors would show only when the first prompt is made. So an export
loads them, renders a short conversation and converts it to tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.speech_template import complete_speech_template
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.chat_template import ChatTemplate, read_template
from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE
from edgellm_ros.engine_directory.schema import read_json
from edgellm_ros.engine_directory.tokenizer_file import load_tokenizer, named_errors

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
OLDER_TEMPLATE_FILE = "chat_template.json"  # of processors
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TEMPLATE_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
GREETING = "hello"  # the user's text of the rendered conversation


def prompt_files(
    checkpoint: Path, vocab_size: int, text_only: bool, transcribes: bool = False
) -> dict[str, bytes]:
    """Read tokenizer, chat template, special tokens: file name -> contents to write.

    text_only: whether the model has no encoders, so that a message is a string. transcribes: see `Model`.
    FileNotFoundError, or ValueError, which names the file, for a tokenizer that cannot be loaded, does not
    fit the vocabulary or encodes nothing, and for a template that cannot be rendered.
    """
    path, tokens = checkpoint / TOKENIZER_FILE, template_tokens(checkpoint)
    tokenizer = read_tokenizer(path, vocab_size)
    source, template = chat_template(checkpoint)
    if transcribes:
        template, prompt = complete_speech_template(str(source), template, tokens)
    else:
        prompt = _render(ChatTemplate.of(str(source), template, tokens), text_only)
    _check_encoding(path, tokenizer, prompt)
    special_tokens = json.dumps(tokens, indent=2, ensure_ascii=False)
    return {
        TOKENIZER_FILE: path.read_bytes(),
        TEMPLATE_FILE: template.encode(),
        SPECIAL_TOKENS_FILE: f"{special_tokens}\n".encode(),
    }


def read_tokenizer(
    path: Path, vocab_size: int | None = None, outside: tuple[str, ...] = ()
) -> tokenizers.Tokenizer:
    """Load a tokenizer and check its ids.

    vocab_size: rows of the embedding table, one for each id; the table may have more. outside: special tokens
    that need no row, because no text becomes them. ValueError also for an
    added token to which the library gives another id than the file.
    """
    stored = read_json(path).get("added_tokens") or []
    tokenizer = load_tokenizer(path)
    for token in stored:  # the library has checked the types
        given = tokenizer.token_to_id(token["content"])
        if given != token["id"]:
            raise ValueError(
                f"{path}: added token {quoted(token['content'])} has the id {token['id']}, but the tokens "
                f"before it leave {given}"
            )
    if vocab_size is not None:
        check_vocabulary(tokenizer, path, vocab_size, outside)
    return tokenizer


def check_vocabulary(
    tokenizer: tokenizers.Tokenizer, path: Path, vocab_size: int, outside: tuple[str, ...] = ()
) -> None:
    """Raise ValueError for ids outside the vocabulary; see `read_tokenizer`."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    ids = {text: token for text, token in ids.items() if text not in outside}
    text = max(ids, key=ids.__getitem__, default="")
    if ids and ids[text] >= vocab_size:
        raise ValueError(
            f"{path}: token {quoted(text)} has the id {ids[text]}, outside the vocabulary of "
            f"{vocab_size}: a tokenizer of another model, or with tokens that were added later?"
        )


def added_token_id(checkpoint: Path, name: str, text: ConfigSection) -> int:
    """Find the id of a token that `tokenizer_config.json` names.

    The name, such as `start_image_token`, is a key of the file, or of its object `extra_special_tokens`.
    ValueError if the token is not named, is no added token of `tokenizer.json`, or is outside the vocabulary.
    """
    path = checkpoint / "tokenizer_config.json"
    config = read_json(path)
    more = config.get("extra_special_tokens")
    named = {**config, **(more if isinstance(more, dict) else {})}.get(name)
    content = named.get("content") if isinstance(named, dict) else named
    if not isinstance(content, str):
        raise ValueError(f"{path}: {name} must be a string or an added token, got {quoted(named)}")
    ids = _added_tokens(checkpoint)
    if content not in ids or not 0 <= ids[content] < text.size("vocab_size"):
        raise ValueError(
            f"{path}: {name} {quoted(content)}: expected an added token of {TOKENIZER_FILE} within the "
            f"vocabulary of {text.size('vocab_size')}"
        )
    return ids[content]


def template_has_token(checkpoint: Path, token: int) -> bool:
    """Tell whether the chat template contains an added token of `tokenizer.json`."""
    _, template = chat_template(checkpoint)
    return any(each == token and content in template for content, each in _added_tokens(checkpoint).items())


def template_tokens(checkpoint: Path) -> dict[str, str]:
    """Read the special tokens that transformers passes to chat templates, by name.

    One of them is `bos_token`. They are in `tokenizer_config.json`. If that file has no
    `added_tokens_decoder`, `special_tokens_map.json` takes precedence (transformers 5.23,
    `PreTrainedTokenizerBase._from_pretrained`). ValueError names file and key.
    """
    path, older = checkpoint / "tokenizer_config.json", checkpoint / SPECIAL_TOKENS_FILE
    config = read_json(path) if path.is_file() else {}
    files = [(path, config)]
    if "added_tokens_decoder" not in config and older.is_file():
        files.append((older, read_json(older)))
    tokens: dict[str, str] = {}
    for source, values in files:
        for name in TEMPLATE_TOKENS:
            value = values.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
            elif value is not None:
                raise ValueError(f"{source}: {name} must be a string or an added token, got {quoted(value)}")
            elif name in values:
                tokens.pop(name, None)
    return tokens


def _added_tokens(checkpoint: Path) -> dict[str, int]:
    """Read the added tokens of `tokenizer.json`: content -> id."""
    added = read_tokenizer(checkpoint / TOKENIZER_FILE).get_added_tokens_decoder()
    return {token.content: each for each, token in added.items()}


def chat_template(checkpoint: Path) -> tuple[Path, str]:
    """Read the chat template from the file where transformers 5.23 finds it.

    Returns file and text. With a processor that is `chat_template.json`, if it exists. Otherwise it is
    `chat_template.jinja`, or else `tokenizer_config.json`.
    """
    template_file, config = checkpoint / TEMPLATE_FILE, checkpoint / "tokenizer_config.json"
    older = checkpoint / OLDER_TEMPLATE_FILE
    if older.is_file() and any((checkpoint / name).is_file() for name in PROCESSOR_FILES):
        return older, ConfigSection(read_json(older), str(older)).text("chat_template")
    if template_file.is_file():
        return template_file, read_template(template_file)
    template = _default_template(read_json(config).get("chat_template")) if config.is_file() else None
    if not isinstance(template, str):
        raise FileNotFoundError(f"{template_file} not found, and tokenizer_config.json has no chat_template")
    return config, template


def _default_template(value: Any) -> Any:
    """Choose the template `default` of several in `tokenizer_config.json`.

    transformers chooses the same one.
    """
    if not isinstance(value, list):
        return value
    entries = [entry for entry in value if isinstance(entry, dict)]
    return next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)


def _render(template: ChatTemplate, text_only: bool) -> str:
    """Render a conversation of one message.

    A template that needs a system prompt gets one. ValueError for a template that renders neither, or leaves
    out the user's text.
    """
    content: Any = GREETING if text_only else [{"type": "text", "text": GREETING}]
    user = {"role": "user", "content": content}
    try:
        prompt = template.render([user])
    except ValueError as error:
        try:
            prompt = template.render([{"role": "system", "content": GREETING}, user])
        except ValueError:
            raise error from None
    if GREETING not in prompt:
        raise ValueError(f"{template.where}: a chat template that leaves out the user's text")
    return prompt


def _check_encoding(path: Path, tokenizer: tokenizers.Tokenizer, prompt: str) -> None:
    """Raise ValueError unless encoding and decoding give the text again."""
    with named_errors(path, "a tokenizer that cannot encode text"):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        plain = tokenizer.encode(GREETING, add_special_tokens=False).ids
    with named_errors(path, "a tokenizer that cannot decode its tokens"):
        tokenizer.decode(ids)
    if not ids or not plain:
        raise ValueError(f"{path}: a tokenizer that has no tokens for {GREETING!r}")
