# SPDX-License-Identifier: Apache-2.0
"""Fields about sampling, which chat and completions share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from edgellm_ros.messages.json_checks import described
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.serving.openai.errors import bad_request
from edgellm_ros.serving.openai.limits import MAX_STOPS, Limits
from edgellm_ros.serving.openai.wire.fields import Fields
from edgellm_ros.serving.openai.wire.lengths import check_grammar

RULES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GRAMMARS = ("regex", "choices")  # of SamplingParams; OpenAI's API does not have them
# Fields of OpenAI's API that do not change an answer.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip


def read_sampling(
    fields: Fields,
    limits: Limits,
    max_tokens: tuple[str, ...],
    default_tokens: int,
    grammar: Mapping[str, Any],
) -> SamplingParams:
    """Read the sampling parameters.

    - max_tokens: names of the field
    - default_tokens: its value if it is absent
    - grammar: the value of `json_schema`, and the `field` of the request that it comes from; empty = none

    Without a seed a random one is taken, as OpenAI's API does. ApiError 400.
    """
    given = {name: value for name in RULES if (value := fields.take(name)) is not None}
    for name in ("presence_penalty", "frequency_penalty"):
        fields.neutral(name, 0, 0.0)
    fields.neutral("logit_bias", {})
    given["max_tokens"] = _max_tokens(fields, limits, max_tokens, default_tokens)
    given["stop"] = _stop(fields)
    seed = fields.integer("seed", 0, 2**64 - 1)
    given["seed"] = secrets.randbits(64) if seed is None else seed
    given |= {name: value for name in GRAMMARS if (value := fields.take(name)) is not None}
    for name in GRAMMARS:
        check_grammar(given.get(name), name)
    check_grammar(grammar.get("json_schema"), str(grammar.get("field")))
    names = {name: name for name in (*RULES, "stop", *GRAMMARS)}
    try:
        return SamplingParams(**given, **{key: grammar[key] for key in grammar if key == "json_schema"})
    except ValueError as error:
        raise bad_request(error, names, str(grammar.get("field", "body"))) from None


def _max_tokens(fields: Fields, limits: Limits, names: tuple[str, ...], default: int) -> int:
    given = [fields.integer(name, 1, limits.max_tokens) for name in names]
    return int(next((value for value in given if value is not None), min(default, limits.max_tokens)))


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise fields.refuse("stop", f"expected a string or a list of strings, got {described(stop)}")
    if len(stops) > MAX_STOPS:
        raise fields.refuse("stop", f"expected at most {MAX_STOPS} strings, got {len(stops)}")
    return tuple(text for text in stops if text)


def read_streaming(fields: Fields) -> tuple[bool, bool]:
    """Return whether the answer is streamed, and whether with its usage."""
    stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise fields.refuse("stream_options", "is for streamed answers only: set stream to true")
    inside = Fields(options, "stream_options")
    include_usage = inside.flag("include_usage")
    inside.neutral("include_obfuscation", False)
    inside.done()
    return stream, include_usage
