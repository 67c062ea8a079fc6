# SPDX-License-Identifier: Apache-2.0
"""Options of requests: sampling, adapter, action head."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli.option_fields import add_options, read_options
from edgellm_ros.echo import quoted
from edgellm_ros.io.contents import read_bytes
from edgellm_ros.runtime.sampling_params import GRAMMAR, SAMPLING, SamplingParams

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig

GRAMMARS = ("json_schema", "regex", "choices")  # of SamplingParams


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of the token sampler."""
    titles = {
        SAMPLING: "what is not given comes from the model's generation_config.json",
        GRAMMAR: "give at most one",
    }
    add_options(parser, SamplingParams, titles)


def sampling_params(args: argparse.Namespace, given: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return the sampling parameters: those of `given`, then of options.

    The runtime adds the checkpoint's.
    """
    sampling, given = read_options(args, SamplingParams), given or {}
    if any(given.get(name) for name in GRAMMARS):
        sampling = {name: value for name, value in sampling.items() if name not in GRAMMARS}
    else:
        sampling["json_schema"] = _schema(args.json_schema)
    return SamplingParams(**{**sampling, **given})


def _schema(given: str) -> str:
    """Return the text of a JSON schema: of a file, or the text itself; "" stays."""
    if not given or given.lstrip().startswith(("{", "[")) or given.strip() in ("true", "false"):
        return given
    try:
        text = read_bytes(given).decode()
    except UnicodeDecodeError:
        raise ValueError(f"--json-schema {given}: not a text file") from None
    if not text.strip():
        raise ValueError(f"--json-schema {given}: the file is empty")
    return text


def common_fields(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Return the fields of LLMGenerationRequest that options set for every request."""
    from edgellm_ros.engine_directory.parts import ACTION, EngineParts

    action_samples = args.action_samples
    if action_samples is None:
        action_samples = 0 if EngineParts(config, args.without).missing(ACTION) else 1
    return {
        "lora": args.lora.partition("=")[0],
        "logprobs": args.logprobs,
        "action_samples": action_samples,
        "noise_seed": args.noise_seed,
        "denoise_steps": args.denoise_steps,
    }


def lora_dirs(option: str, engine_dir: str) -> dict[str, Path]:
    """Return the adapter of --lora as {name: directory}; empty for the base model.

    ValueError for an unknown name, and for NAME= without a directory or file.
    """
    from edgellm_ros.runtime.adapters.lora import find_adapter

    name, given, elsewhere = option.partition("=")
    if given and not elsewhere:
        raise ValueError(f"--lora {quoted(option)}: expected a directory or a file after '='")
    directory = Path(elsewhere) if given else find_adapter(engine_dir, name)
    return {} if directory is None else {name: directory}
