# SPDX-License-Identifier: Apache-2.0
"""PolicyService: one message of openpi's protocol in, one chunk of actions out."""

from __future__ import annotations

import time
from typing import Any

from edgellm_ros.diffusion.policy_config import CameraConfig, FixedCameraConfig, FlowPolicyConfig
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.openpi.keys import ObservationKeys
from edgellm_ros.openpi.observation import read_observation
from edgellm_ros.openpi.wire import unpack
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

TIMING = "server_timing"


class PolicyService:
    """Answers observations; for one thread at a time.

    - keys: where an observation has what the policy takes
    - default_prompt: the task of an observation without one

    ValueError for an engine that is no policy, or whose plans take observations of several times.
    """

    def __init__(self, runtime: LLMInferenceRuntime, keys: ObservationKeys, default_prompt: str = "") -> None:
        policy = runtime.config.policy
        if policy is None:
            raise ValueError(
                "openpi's protocol has actions only: the engine must be a policy (docs/remote.md)"
            )
        if policy.observation_steps > 1:
            raise ValueError(
                f"this policy takes {policy.observation_steps} observations of several times, openpi's "
                "protocol has one: run it in the node on the robot, or over ROS (docs/remote.md)"
            )
        self._runtime = runtime
        self._keys = keys
        self._default_prompt = default_prompt
        self._needs_prompt = isinstance(policy, FlowPolicyConfig)
        self.metadata = metadata_of(runtime.config, keys)

    def answer(self, message: bytes) -> dict[str, Any]:
        """Return `actions` [T, A] float32 in physical units, and `server_timing` in ms.

        ValueError in one line for a message or an observation that is malformed or does not fit the policy.
        EngineError if an engine fails.
        """
        observation = read_observation(unpack(message), self._keys)
        prompt = observation.prompt or self._default_prompt
        if self._needs_prompt and not prompt:
            raise ValueError(f"{self._keys.prompt} is missing: this policy takes a task in words")
        request = LLMGenerationRequest(
            prompt,
            images=tuple(observation.images.values()),
            cameras=tuple(observation.images),
            state=observation.state,
        )
        began = time.perf_counter()
        actions = self._runtime.handle_request(request).actions
        assert actions is not None  # only a cancelled request has none
        return {"actions": actions[0], TIMING: {"infer_ms": (time.perf_counter() - began) * 1000}}


def metadata_of(config: EngineConfig, keys: ObservationKeys) -> dict[str, Any]:
    """Return what a client is told when it connects.

    Keys, sizes of images that are not resized (height, width), names, units and rate.
    """
    policy = config.policy
    assert policy is not None
    space = policy.action_space
    return {
        "server": "edgellm",
        "policy": policy.kind,
        "image_keys": dict(zip(keys.cameras, keys.images, strict=True)),
        "image_sizes": _image_sizes(policy.cameras),
        "state_keys": list(keys.state),
        "state_names": [] if policy.state is None else list(policy.state.names),
        "prompt_key": keys.prompt,
        "action_names": list(space.names),
        "action_units": list(space.units),
        "action_horizon": space.horizon,
        "dt": space.dt,
    }


def _image_sizes(cameras: CameraConfig) -> dict[str, list[int]]:
    if not isinstance(cameras, FixedCameraConfig):
        return {}
    sizes = zip(cameras.names, cameras.heights, cameras.widths, strict=True)
    return {name: [height, width] for name, height, width in sizes}
