# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's special and stop tokens, sampling defaults and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.engine_directory.config import GenerationDefaults, SpecialTokens
from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE
from edgellm_ros.engine_directory.schema import read_json

VOCAB_MAP = "vocab_map"  # name of the tensor and of its file
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
OLDER_TEMPLATE_FILE = "chat_template.json"  # of processors
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TEMPLATE_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MULTIMODAL_TOKENS = ("image", "vision_start", "vision_end", "audio", "audio_start", "audio_end")


def read_generation_config(checkpoint: Path) -> ConfigSection:
    """Read `generation_config.json`; empty if the checkpoint has no such file."""
    path = checkpoint / "generation_config.json"
    return ConfigSection(read_json(path) if path.is_file() else {}, str(path))


def special_tokens(config: ConfigSection, text: ConfigSection, generation: ConfigSection) -> SpecialTokens:
    """Read special ids from `config.json`.

    The pad id comes from the text section or `generation_config.json`, else it is 0; padding is masked, so
    that any id gives the same results. ValueError for ids outside the vocabulary.
    """
    padded = next((section for section in (text, generation) if section.has("pad_token_id")), None)
    ids = {f"{name}_token_id": _token_id(config, f"{name}_token_id", text) for name in MULTIMODAL_TOKENS}
    pad = _token_id(padded, "pad_token_id", text) if padded else None
    return SpecialTokens(pad_token_id=pad or 0, **ids)


def added_token_id(checkpoint: Path, name: str, text: ConfigSection) -> int:
    """Find the id of a token that `tokenizer_config.json` names.

    The name, such as `start_image_token`, is a key of the file, or of its object `extra_special_tokens`.
    ValueError if the token is not named, is no added token of `tokenizer.json`, or is outside the vocabulary.
    """
    path = checkpoint / "tokenizer_config.json"
    config = read_json(path)
    named = {**config, **(config.get("extra_special_tokens") or {})}.get(name)
    content = named.get("content") if isinstance(named, dict) else named
    if not isinstance(content, str):
        raise ValueError(f"{path}: {name} must be a string or an added token, got {named!r}")
    ids = _added_tokens(checkpoint)
    if content not in ids or not 0 <= ids[content] < text.size("vocab_size"):
        raise ValueError(
            f"{path}: {name} {content!r}: expected an added token of {TOKENIZER_FILE} within the vocabulary "
            f"of {text.size('vocab_size')}"
        )
    return ids[content]


def template_has_token(checkpoint: Path, token: int) -> bool:
    """Tell whether the chat template contains an added token of `tokenizer.json`."""
    template = _chat_template(checkpoint)
    return any(each == token and content in template for content, each in _added_tokens(checkpoint).items())


def _added_tokens(checkpoint: Path) -> dict[str, int]:
    """Read the added tokens of `tokenizer.json`: content -> id."""
    added = read_json(checkpoint / TOKENIZER_FILE).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added}


def stop_token_ids(text: ConfigSection, generation: ConfigSection) -> tuple[int, ...]:
    """Read the ids that end an answer.

    `eos_token_id` of `generation_config.json` takes precedence over that of the text section. ValueError if
    both are missing.
    """
    source = generation if generation.has("eos_token_id") else text
    if not source.has("eos_token_id"):
        raise ValueError(
            f"neither {generation.where} nor {text.where} has an eos_token_id: no answer would end"
        )
    several = isinstance(source.data["eos_token_id"], list)
    ids = list(source.integers("eos_token_id")) if several else [source.integer("eos_token_id")]
    if not ids:
        raise source.fail("eos_token_id", "expected at least one token")
    if not all(0 <= token < text.size("vocab_size") for token in ids):
        raise source.fail("eos_token_id", f"outside the vocabulary of {text.size('vocab_size')}")
    return tuple(dict.fromkeys(ids))


def _token_id(section: ConfigSection, key: str, text: ConfigSection) -> int | None:
    if not section.has(key):
        return None
    value = section.integer(key)
    if not 0 <= value < text.size("vocab_size"):
        raise section.fail(key, f"outside the vocabulary of {text.size('vocab_size')}")
    return value


def generation_defaults(generation: ConfigSection) -> GenerationDefaults:
    """Read sampling defaults of `generation_config.json`.

    Missing keys have the defaults of transformers.
    """
    penalty = generation.number("repetition_penalty", 1.0)
    if not generation.flag("do_sample", False):
        return GenerationDefaults(repetition_penalty=penalty)
    return GenerationDefaults(
        temperature=generation.number("temperature", 1.0),
        top_k=generation.integer("top_k", 50),
        top_p=generation.number("top_p", 1.0),
        repetition_penalty=penalty,
    )


def read_vocab_map(path: Path, vocab_size: int, stop_token_ids: Sequence[int]) -> np.ndarray:
    """Read the tokens that a model may generate: [V] int32, ascending.

    The file is a safetensors file whose tensor `vocab_map` lists the tokens in any order. FileNotFoundError
    or ValueError names the file, also if a stop token is missing, without which no answer would end.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    if VOCAB_MAP not in tensors:
        raise ValueError(f"{path}: expected a tensor {VOCAB_MAP!r}, found {', '.join(tensors) or 'none'}")
    ids = tensors[VOCAB_MAP]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: {VOCAB_MAP} must be integers [V], got {ids.dtype} {list(ids.shape)}")
    outside = [int(token) for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"{path}: token {outside[0]} is outside the vocabulary of {vocab_size}")
    missing = sorted(set(stop_token_ids).difference(ids.tolist()))
    if missing:
        raise ValueError(f"{path}: {VOCAB_MAP} lacks the stop tokens {missing}: no answer would end")
    return np.unique(ids).astype(np.int32)


def tokenizer_files(checkpoint: Path) -> dict[str, bytes]:
    """Read tokenizer, chat template, special tokens: file name -> contents to write."""
    tokenizer = checkpoint / TOKENIZER_FILE
    read_json(tokenizer)
    special_tokens = json.dumps(template_tokens(checkpoint), indent=2, ensure_ascii=False)
    return {
        TOKENIZER_FILE: tokenizer.read_bytes(),
        TEMPLATE_FILE: _chat_template(checkpoint).encode(),
        SPECIAL_TOKENS_FILE: f"{special_tokens}\n".encode(),
    }


def _chat_template(checkpoint: Path) -> str:
    """Read the chat template from the file where transformers 5.23 finds it.

    With a processor that is `chat_template.json`, if it exists. Otherwise it is `chat_template.jinja`, or
    else `tokenizer_config.json`.
    """
    template_file, config = checkpoint / TEMPLATE_FILE, checkpoint / "tokenizer_config.json"
    older = checkpoint / OLDER_TEMPLATE_FILE
    if older.is_file() and any((checkpoint / name).is_file() for name in PROCESSOR_FILES):
        return ConfigSection(read_json(older), str(older)).text("chat_template")
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    template = _default_template(read_json(config).get("chat_template")) if config.is_file() else None
    if not isinstance(template, str):
        raise FileNotFoundError(f"{template_file} not found, and tokenizer_config.json has no chat_template")
    return template


def _default_template(value: Any) -> Any:
    """Choose the template `default` of several in `tokenizer_config.json`.

    transformers chooses the same one.
    """
    if not isinstance(value, list):
        return value
    entries = [entry for entry in value if isinstance(entry, dict)]
    return next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)


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
                raise ValueError(f"{source}: {name} must be a string or an added token, got {value!r}")
            elif name in values:
                tokens.pop(name, None)
    return tokens
