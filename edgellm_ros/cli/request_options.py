# SPDX-License-Identifier: Apache-2.0
"""Options of requests: sampling, adapter, action head, files that requests name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli import arguments
from edgellm_ros.cli.inputs import read_bytes
from edgellm_ros.cli.request_files import FileReaders, ReadSound
from edgellm_ros.cli.sound_file import read_sound
from edgellm_ros.cli.video_file import read_video

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.runtime.request import SamplingParams


GRAMMARS = ("json_schema", "regex", "choices")  # of SamplingParams


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of the token sampler."""
    group = parser.add_argument_group(
        "sampling", "what is not given comes from the model's generation_config.json"
    )
    group.add_argument(
        "--temperature",
        type=arguments.number(0),
        metavar="T",
        help="sampling temperature; 0 takes the likeliest token",
    )
    group.add_argument(
        "--top-k", type=arguments.integer(0), metavar="K", help="keep the K likeliest tokens; 0 keeps all"
    )
    group.add_argument(
        "--top-p",
        type=arguments.number(0, 1),
        metavar="P",
        help="keep the smallest set of likeliest tokens with probability P",
    )
    group.add_argument(
        "--min-p",
        type=arguments.number(0, 1),
        metavar="P",
        help="drop tokens below P times the likeliest (default: 0, off)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=arguments.number(0),
        metavar="R",
        help="above 1: make repeated tokens less likely",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; repeat for several",
    )
    group.add_argument(
        "--seed", type=arguments.SEED, metavar="N", help="seed of the token sampler (default: 0)"
    )
    group.add_argument(
        "--max-tokens", type=arguments.integer(1), metavar="N", help="longest answer in tokens"
    )
    group = parser.add_argument_group("grammar of the answer", "give at most one")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="answer with JSON of this JSON schema: a file, or {...}"
    )
    grammar.add_argument("--regex", metavar="REGEX", help="answer with text that matches as a whole")
    grammar.add_argument(
        "--choices", type=lambda text: tuple(text.split(",")), metavar="A,B", help="answer with one of these"
    )


def sound_reader(engine_dir: str, config: EngineConfig) -> ReadSound:
    """Return the function that reads a sound file for an engine."""

    def read(path: str | Path) -> Sound:
        if config.audio is None:
            raise ValueError(f"{path}: {engine_dir} has no audio encoder")
        return read_sound(path, config.audio.max_seconds(config.builder.max_input_len))

    return read


def file_readers(engine_dir: str, config: EngineConfig) -> FileReaders:
    """Return the functions that read sound and video files for an engine."""
    return FileReaders(sound_reader(engine_dir, config), lambda path, fps: read_video(path, fps, config))


def sampling_params(
    args: argparse.Namespace, config: EngineConfig, given: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return the sampling parameters: `given`, then options, then the checkpoint's."""
    from edgellm_ros.runtime.request import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")
    sampling: dict[str, Any] = {
        name: getattr(config.generation, name)
        for name in ("temperature", "top_k", "top_p", "repetition_penalty")
    }
    sampling.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    given = given or {}
    if not any(given.get(name) for name in GRAMMARS):
        sampling.update(_grammar(args))
    return SamplingParams(**{**sampling, "stop": tuple(args.stop), **given})


def _grammar(args: argparse.Namespace) -> dict[str, Any]:
    """Return the grammar that the options give, as fields of SamplingParams."""
    schema = args.json_schema
    if schema is None:
        return {name: getattr(args, name) for name in GRAMMARS if getattr(args, name)}
    if schema.lstrip().startswith("{"):
        return {"json_schema": schema}
    try:
        text = read_bytes(schema).decode()
    except UnicodeDecodeError:
        raise ValueError(f"--json-schema {schema}: not a text file") from None
    if not text.strip():
        raise ValueError(f"--json-schema {schema}: the file is empty")
    return {"json_schema": text}


def common_fields(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Return the fields of LLMGenerationRequest that options set for every request."""
    action_samples = args.action_samples
    if action_samples is None:
        action_samples = 0 if config.action is None else 1
    return {
        "lora": args.lora.partition("=")[0],
        "logprobs": args.logprobs,
        "action_samples": action_samples,
        "noise_seed": args.noise_seed,
        "denoise_steps": args.denoise_steps,
    }


def lora_dirs(option: str, engine_dir: str) -> dict[str, Path]:
    """Return the adapter of --lora as {name: directory}; empty for the base model."""
    from edgellm_ros.runtime.lora import find_adapter

    name, given, elsewhere = option.partition("=")
    directory = Path(elsewhere) if given else find_adapter(engine_dir, name)
    return {} if directory is None else {name: directory}
