# SPDX-License-Identifier: Apache-2.0
"""Requests to /v1/completions and /v1/embeddings: texts without a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgellm_ros.messages.json_checks import described
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.serving.openai.errors import ApiError, bad_request
from edgellm_ros.serving.openai.limits import MAX_CHOICES, MAX_PROMPTS, Limits
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.wire.asked import Asked, repeated
from edgellm_ros.serving.openai.wire.fields import Fields
from edgellm_ros.serving.openai.wire.lengths import characters_of, check_prompt
from edgellm_ros.serving.openai.wire.sampling import IGNORED, read_sampling, read_streaming

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig

Encode = Callable[[str], Sequence[int]]
MAX_LOGPROBS = 5
DEFAULT_TOKENS = 16  # of a completion, as in OpenAI's API


def read_completion(data: Any, encode: Encode, models: Models, config: EngineConfig, limits: Limits) -> Asked:
    """Read a request to /v1/completions.

    encode: converts a text to ids. ApiError 400 for a field that is wrong, 404 for an unknown model.
    """
    fields = Fields(data)
    model = fields.text("model", models.base)
    adapter = models.adapter(model)
    prompts = _prompts(fields, "prompt", encode, config)
    sampling = read_sampling(fields, limits, ("max_tokens",), DEFAULT_TOKENS, {})
    choices = fields.integer("n", 1, MAX_CHOICES, 1)
    fields.neutral("best_of", choices)
    fields.neutral("echo", False)
    fields.neutral("suffix", "")
    stream, include_usage = read_streaming(fields)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    fields.done(IGNORED)
    requests: list[LLMGenerationRequest] = []
    for place, ids in prompts:
        request = _request(ids, place, lora=adapter, sampling=sampling, logprobs=_at_least_one(logprobs))
        requests += repeated(request, choices)
    return Asked(model, tuple(requests), choices, stream, include_usage, logprobs=logprobs)


def read_embedding(data: Any, encode: Encode, models: Models, config: EngineConfig) -> tuple[Asked, bool]:
    """Read a request to /v1/embeddings; also whether vectors are wanted in base64.

    ApiError as for completions, and for an engine without hidden states.
    """
    fields = Fields(data)
    model = fields.text("model", models.base)
    adapter = models.adapter(model)
    if not config.hidden_state_layers:
        raise ApiError(
            400,
            "model: this engine has no hidden states, which embeddings are made of: export it with "
            f"--hidden-states {config.llm.num_hidden_layers}",
            "model",
        )
    prompts = _prompts(fields, "input", encode, config)
    as_base64 = fields.choice("encoding_format", ("float", "base64"), "float") == "base64"
    fields.neutral("dimensions", config.llm.hidden_size)
    fields.done(IGNORED)
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    requests = (
        _request(ids, place, lora=adapter, sampling=one_token, output_hidden_states=True)
        for place, ids in prompts
    )
    return Asked(model, tuple(requests)), as_base64


def _at_least_one(logprobs: int | None) -> int:
    """Return the request's `logprobs`, whose 0 is none at all."""
    return 0 if logprobs is None else max(logprobs, 1)


def _prompts(fields: Fields, name: str, encode: Encode, config: EngineConfig) -> list[tuple[str, list[int]]]:
    """Return places and ids of a text or of ids, or of each item of a list of these."""
    given = fields.need(name)
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
        return [(name, _ids(given, name, encode, config))]
    if not isinstance(given, list) or not given:
        raise fields.refuse(name, f"expected a text, token ids, or a list of these, got {described(given)}")
    if len(given) > MAX_PROMPTS:
        raise fields.refuse(name, f"expected at most {MAX_PROMPTS} items, got {len(given)}")
    places = [f"{name}[{index}]" for index in range(len(given))]
    return [(place, _ids(item, place, encode, config)) for place, item in zip(places, given, strict=True)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(given: Any, place: str, encode: Encode, config: EngineConfig) -> list[int]:
    check_prompt(characters_of(given), config, place)
    if isinstance(given, str):
        try:
            ids = list(encode(given))
        except ValueError as error:
            raise ApiError(400, f"{place}: {error}", place) from None
    elif isinstance(given, list) and all(map(_is_id, given)):
        ids = given
    else:
        raise ApiError(400, f"{place}: expected a text or token ids, got {described(given)}", place)
    if not ids:
        raise ApiError(400, f"{place}: expected at least one token, got an empty text", place)
    return ids


def _request(ids: list[int], place: str, **fields: Any) -> LLMGenerationRequest:
    try:
        return LLMGenerationRequest(prompt_ids=tuple(ids), **fields)
    except ValueError as error:
        raise bad_request(error, {}, place) from None
