# SPDX-License-Identifier: Apache-2.0
"""PolicyPreparer: checks requests to a policy and makes the inputs of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from edgellm_ros.diffusion.action_spaces import make_reference
from edgellm_ros.diffusion.affine_space import model_state
from edgellm_ros.diffusion.policy_config import PolicyConfig, StateConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.adapters.adapter_folder import canonical_name
from edgellm_ros.runtime.policy.engines import PolicyEngines
from edgellm_ros.runtime.policy.observations import observed_images, observed_states
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.sampling_params import SamplingParams

# Fields of a request that only a language model has an answer to, with the values that do not ask for it.
# None stands for every value: only None does not ask.
LANGUAGE_MODEL_FIELDS: dict[str, Any] = {
    "system_prompt": "", "audio": (), "videos": (), "messages": None, "tools": (), "history": None,
    "speed": None, "lora": "", "lm_head": "", "logprobs": 0, "output_hidden_states": False,
    "enable_thinking": None, "chat_template_kwargs": {}, "disable_spec_decode": False, "navigation": "",
    "guidance": None,
}  # fmt: skip


class PolicyPreparer:
    """Checks requests.

    The engines have `max_samples` samples and batches of `max_batch_size` requests.
    """

    def __init__(
        self, config: PolicyConfig, engines: PolicyEngines, max_samples: int, max_batch_size: int
    ) -> None:
        self._config = config
        self._engines = engines
        self._max_samples = max_samples
        self._max_batch_size = max_batch_size

    def prepare(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[PolicySequence]:
        """Prepare requests; ValueError for an invalid one.

        noise_seed: of requests without one.
        """
        if not 1 <= len(requests) <= self._max_batch_size:
            raise ValueError(
                f"a batch has 1 to {self._max_batch_size} requests (max_batch_size), got {len(requests)}"
            )
        sequences = []
        for index, request in enumerate(requests):
            try:
                sequences.append(self._prepare(request, noise_seed))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}" if len(requests) > 1 else str(error)) from None
        return sequences

    def _prepare(self, request: LLMGenerationRequest, noise_seed: int) -> PolicySequence:
        unanswerable = _language_model_field(request)
        if unanswerable:
            raise ValueError(f"this engine is a policy, the request has {unanswerable}")
        config = self._config
        if request.previous_chunk is not None:
            try:
                request.previous_chunk.check(config)
            except ValueError as error:
                raise ValueError(f"previous_chunk: {error}") from None
        images = self._images(request)
        states = observed_states(request.state, config.observation_steps)
        state = _state(states, config.state)
        tokens = self._engines.tokens(request, state)
        samples = max(1, request.action_samples)
        if samples > self._max_samples:
            raise ValueError(
                f"action_samples is {samples}; this engine takes at most {self._max_samples} "
                "(max_action_samples)"
            )
        return PolicySequence(
            request=request,
            images=images,
            token_ids=tokens,
            state=state,
            samples=samples,
            noise_seed=noise_seed if request.noise_seed is None else request.noise_seed,
            prefix_rows=self._engines.rows(images, len(tokens)),
            reference=make_reference(states[-1], config.action_space),
        )

    def _images(self, request: LLMGenerationRequest) -> tuple[np.ndarray, ...]:
        """Sort the images by camera.

        Cameras may be missing if the request names those of its images.
        """
        known, given = self._config.cameras.names, request.cameras
        if not request.images:
            raise ValueError(f"a policy needs an image of at least one camera: {', '.join(known)}")
        if not given:
            if len(request.images) != len(known):
                raise ValueError(
                    f"the request has {len(request.images)} images for the cameras {', '.join(known)}: "
                    "name the cameras of the images"
                )
            given = known
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"unknown camera {quoted(unknown[0])}; the policy has {', '.join(known)}")
        by_name = dict(zip(given, request.images, strict=True))
        images: dict[str, np.ndarray] = {}
        for name, image in by_name.items():
            images[name] = observed_images(name, image, self._config.observation_steps)
        return tuple(images[name] for name in known if name in images)


def _state(states: Sequence[Any], config: StateConfig | None) -> np.ndarray | None:
    """Check the states of observations and normalise them.

    Returns [O, model_dim] float32; None for a policy that takes no state. ValueError as of `model_state`, and
    for a state that the policy does not take.
    """
    if config is not None:
        return np.concatenate([model_state(state, config) for state in states])
    if states[-1] is not None:
        raise ValueError("this policy takes no state, the request has one")
    return None


def _language_model_field(request: LLMGenerationRequest) -> str:
    """Return the first field that only a language model has an answer to.

    "" if the request has none.
    """
    for name, absent in LANGUAGE_MODEL_FIELDS.items():
        value = getattr(request, name)
        if name in ("lora", "lm_head"):
            value = canonical_name(value)
        if value is not None and (absent is None or value != absent):
            return name
    if request.sampling.grammar is not None:
        return "a grammar"
    rules = fields(SamplingParams)
    return next((rule.name for rule in rules if getattr(request.sampling, rule.name) != rule.default), "")
