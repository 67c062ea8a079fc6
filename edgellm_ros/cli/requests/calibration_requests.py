# SPDX-License-Identifier: Apache-2.0
"""Reads the requests that a model runs on for calibration or for a report.

- a text file: a prompt in each line
- .jsonl: a prompt, or a request as in `edgellm generate --requests`, in each line as JSON
- a bag: its commands and utterances with the camera frames (bag_requests.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edgellm_ros.cli.requests.bag_requests import spread
from edgellm_ros.cli.requests.request_files import request_fields
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.io.contents import read_bytes
from edgellm_ros.messages.engine_readers import file_readers
from edgellm_ros.runtime.conversation import TextPart
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from edgellm_ros.strict_json import parse_json

MAX_REQUESTS = 128
ANSWER_TOKENS = 32
BAGS = (".mcap", ".db3")
JSON_LINES = (".jsonl", ".ndjson")
NOT_USED = ("sampling", "lora", "logprobs", "action_samples", "noise_seed", "denoise_steps")
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=ANSWER_TOKENS)


def read_requests(path: str | Path, config: EngineConfig) -> dict[str, LLMGenerationRequest]:
    """Read at most MAX_REQUESTS requests of a file or bag, by their places in it.

    Requests are spread over the file or bag. Each has an answer of at most ANSWER_TOKENS, greedily. config:
    of the engine that answers. ValueError or OSError, which names the file and the line, or the bag.
    """
    if Path(path).is_dir() or Path(path).suffix in BAGS:
        from edgellm_ros.cli.requests.bag_requests import read_bag

        return read_bag(path, config, MAX_REQUESTS, GREEDY)
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from None
    found = [(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: expected a prompt in each line, found none")
    found = [found[index] for index in spread(len(found), MAX_REQUESTS)]
    if Path(path).suffix.lower() not in JSON_LINES:
        return {where: LLMGenerationRequest(line, sampling=GREEDY) for where, line in found}
    return {where: _request(where, line, Path(path), config) for where, line in found}


def text_of(requests: Iterable[LLMGenerationRequest]) -> str:
    """Return the words of prompts and messages in lines; "" if there are none."""
    texts: list[str] = []
    for request in requests:
        messages = request.messages or ()
        parts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
        texts += [request.prompt, *parts]
    return "\n".join(text for text in texts if text)


def _request(where: str, line: str, path: Path, config: EngineConfig) -> LLMGenerationRequest:
    """Make the request of a line of JSON."""
    try:
        data = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if isinstance(data, str):
        data = {"prompt": data}
    fields = request_fields(data, where, path, file_readers("the checkpoint", config))
    try:
        used = {name: value for name, value in fields.items() if name not in NOT_USED}
        return LLMGenerationRequest(**used, sampling=GREEDY)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
