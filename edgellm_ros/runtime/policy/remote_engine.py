# SPDX-License-Identifier: Apache-2.0
"""RemoteEngine: a policy on another computer, by openpi's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.centred_image import centred_image
from edgellm_ros.openpi.client import PolicyClient
from edgellm_ros.openpi.token import read_token
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest


class RemoteEngine:
    """Asks a server for actions; see `PolicyEngines`.

    The first request connects, and so does the first one after a failure.
    """

    def __init__(self, config: OpenPiConfig, metrics: RuntimeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._client = PolicyClient(
            config.url,
            token=read_token(config.token_file) if config.token_file else "",
            timeout_s=config.timeout_s,
            check_metadata=self._check_metadata,
        )

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        if request.denoise_steps is not None:
            raise ValueError(f"denoise_steps is {request.denoise_steps}, but the server chooses them")
        return []

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        names = self._config.cameras.names
        if len(images) != len(names):
            raise ValueError(f"the request has {len(images)} images, expected one of each camera: {names}")
        return len(images)

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        if not sequence.report("action", 0):
            return None
        config, space = self._config, self._config.action_space
        observation = make_observation(config, sequence.images, sequence.state, sequence.request.prompt)
        clock.end("vision_s")
        actions = self._client.infer(observation, lambda: not sequence.report("action", 0))
        clock.end("action_s")
        if actions is None:
            return None
        if actions.shape != (space.horizon, space.dim):
            raise EngineError(
                f"{config.url} answers with {list(actions.shape)} actions, expected "
                f"{[space.horizon, space.dim]}: repeat `edgellm connect-policy`"
            )
        self._metrics.multimodal.total_images += len(sequence.images)
        self._metrics.action.total_runs += 1
        return actions[None]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _check_metadata(self, metadata: Any) -> None:
        """Refuse another policy than the one that the directory was made for.

        Only a server of this package tells names, units and rate.
        """
        told, space = metadata if isinstance(metadata, dict) else {}, self._config.action_space
        expected = {"action_names": list(space.names), "dt": space.dt}
        if any(space.units):
            expected["action_units"] = list(space.units)
        for key, value in expected.items():
            found = told.get(key)
            if found is not None and found != value:
                raise ValueError(
                    f"its {key} is {quoted(found)}, expected {quoted(value)}: repeat `edgellm connect-policy`"
                )


def make_observation(
    config: OpenPiConfig, images: Sequence[np.ndarray], state: np.ndarray | None, prompt: str
) -> dict[str, Any]:
    """Return the observation for images [H, W, 3] uint8 by camera and a state [1, S]."""
    if config.image_size:
        height, width = config.image_size
        images = [centred_image(image, height, width) for image in images]
    observation: dict[str, Any] = dict(zip(config.image_keys, images, strict=True))
    if state is not None:
        ends = np.cumsum(config.state_sizes)[:-1]
        observation |= zip(config.state_keys, np.split(state[0], ends), strict=True)
    return observation | {config.prompt_key: prompt}
