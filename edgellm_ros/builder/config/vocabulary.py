# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's special and stop tokens and its sampling defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.engine_directory.config import GenerationDefaults, SpecialTokens
from edgellm_ros.engine_directory.schema import read_json

VOCAB_MAP = "vocab_map"  # name of the tensor and of its file
MULTIMODAL_TOKENS = ("image", "vision_start", "vision_end", "audio", "audio_start", "audio_end")
OTHER_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "video_token_id")


def read_generation_config(checkpoint: Path) -> ConfigSection:
    """Read `generation_config.json`; empty if the checkpoint has no such file."""
    path = checkpoint / "generation_config.json"
    return ConfigSection(read_json(path) if path.is_file() else {}, str(path))


def special_tokens(config: ConfigSection, text: ConfigSection, generation: ConfigSection) -> SpecialTokens:
    """Read special ids from `config.json`.

    The pad id comes from the text section or `generation_config.json`, else it is 0; padding is masked, so
    that any id gives the same results. ValueError for ids outside the vocabulary, also for those
    that are not read.
    """
    for section in {each.where: each for each in (config, text, generation)}.values():
        for key in OTHER_TOKENS:
            _check_ids(section, key, text)
    padded = next((section for section in (text, generation) if section.has("pad_token_id")), None)
    ids = {f"{name}_token_id": _token_id(config, f"{name}_token_id", text) for name in MULTIMODAL_TOKENS}
    pad = _token_id(padded, "pad_token_id", text) if padded else None
    return SpecialTokens(pad_token_id=pad or 0, **ids)


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
    ids = _check_ids(source, "eos_token_id", text)
    if not ids:
        raise source.fail("eos_token_id", "expected at least one token")
    return tuple(dict.fromkeys(ids))


def _token_id(section: ConfigSection, key: str, text: ConfigSection) -> int | None:
    if not section.has(key):
        return None
    section.integer(key)
    return _check_ids(section, key, text)[0]


def _check_ids(section: ConfigSection, key: str, text: ConfigSection) -> tuple[int, ...]:
    """Read one id or a list of ids; none for null or a missing key.

    ValueError for ids outside the vocabulary.
    """
    if not section.has(key):
        return ()
    several = isinstance(section.data[key], list)
    ids = section.integers(key) if several else (section.integer(key),)
    if not all(0 <= token < text.size("vocab_size") for token in ids):
        raise section.fail(key, f"outside the vocabulary of {text.size('vocab_size')}")
    return ids


def generation_defaults(generation: ConfigSection) -> GenerationDefaults:
    """Read sampling defaults of `generation_config.json`.

    Missing keys have the defaults of transformers.
    """
    penalty = generation.number("repetition_penalty", 1.0)
    if not generation.flag("do_sample", False):
        return generation.make(GenerationDefaults, repetition_penalty=penalty)
    return generation.make(
        GenerationDefaults,
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
