# SPDX-License-Identifier: Apache-2.0
"""Reads the requests that a model runs on for calibration or for a report: prompts, or a bag.

- a text file: a prompt in each line
- .jsonl: a prompt, or a request as in `edgellm generate --requests`, in each line as JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from edgellm_ros.cli.generate import file_readers
from edgellm_ros.cli.inputs import read_bytes
from edgellm_ros.cli.request_files import request_fields
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

ANSWER_TOKENS = 32
JSON_LINES = (".jsonl", ".ndjson")
NOT_USED = ("sampling", "lora", "logprobs", "action_samples", "noise_seed", "denoise_steps")
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS)
Item = TypeVar("Item")


def read_requests(
    path: str | Path, config: EngineConfig, most: int | None = None
) -> dict[str, LLMGenerationRequest]:
    """Read requests by their places in the file, each with an answer of at most ANSWER_TOKENS, greedily.

    config: of the engine that answers; most: how many are taken, spread over the file, None = all. ValueError
    or OSError, which names the file and the line.
    """
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from None
    found = [(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: expected a prompt in each line, found none")
    found = spread(found, most)
    if Path(path).suffix.lower() not in JSON_LINES:
        return {where: LLMGenerationRequest(line, sampling=GREEDY) for where, line in found}
    return {where: _request(where, line, Path(path), config) for where, line in found}


def spread(items: Sequence[Item], most: int | None) -> list[Item]:
    """Take at most this many items, evenly spread."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def _request(where: str, line: str, path: Path, config: EngineConfig) -> LLMGenerationRequest:
    """Make the request of a line of JSON."""
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if isinstance(data, str):
        data = {"prompt": data}
    fields = request_fields(data, where, path, file_readers("the checkpoint", config))
    try:
        used = {name: value for name, value in fields.items() if name not in NOT_USED}
        return LLMGenerationRequest(**used, sampling=GREEDY)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
