# SPDX-License-Identifier: Apache-2.0
"""ActionHead: the interface of action heads.

`ActionRunner` samples actions of a head. Every kind of head has a sampler, and an engine for its steps:

- in: `trajectory [n,T,A]`, the actions of n samples; `time [N]`, one time for all actions or one for each;
  and what the head binds, such as KV caches or the keys and values of a prefix
- out: of a flow `velocity [n,T,A]`, the derivative of the trajectory with respect to the time; of a noise
  schedule `prediction [n,T,A]`, the noise in the trajectory or the clean actions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgellm_ros.diffusion.samplers import Sampler
from edgellm_ros.engine.tensor import Tensor


class SpaceConfig(Protocol):
    """What the actions of any space are."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values of an action."""
        ...

    @property
    def units(self) -> tuple[str, ...]:
        """Units of the physical values; "" = unknown."""
        ...

    @property
    def dt(self) -> float:
        """Seconds per action."""
        ...

    @property
    def horizon(self) -> int:
        """Actions of a chunk."""
        ...

    @property
    def dim(self) -> int:
        """Values of an action."""
        ...


class HeadConfig(Protocol):
    """What the configurations of all kinds have."""

    @property
    def action_space(self) -> SpaceConfig:
        """Names, units and rate of the actions."""
        ...

    @property
    def has_flow(self) -> bool:
        """Whether actions come from noise by a flow, which a previous chunk can steer."""
        ...

    @property
    def rtc_max_delay(self) -> int:
        """Maximum delay of real-time chunking, in actions; 0 = not supported.

        The head was trained to continue up to this many first actions of the previous chunk.
        """
        ...


class SampledConfig(HeadConfig, Protocol):
    """What the configurations of all kinds have whose actions come from noise."""

    @property
    def num_denoise_steps(self) -> int:
        """Default number of steps of the sampler."""
        ...


class ActionSpace(Protocol):
    """From the model's values to physical actions, and back."""

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """Convert the model's values to physical actions."""
        ...

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical actions to the model's values."""
        ...

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Limit physical actions to those that the robot can do, in float32."""
        ...

    def integrate(self, actions: np.ndarray, speed: float) -> np.ndarray | None:
        """Integrate actions to paths of the base; None if the actions move no base."""
        ...


@dataclass(frozen=True)
class BoundContext:
    """The engine's inputs that stay the same in all steps.

    All steps of one request share them.
    """

    tensors: dict[str, Tensor]  # by name of the binding
    dims: dict[str, int]  # values of the symbols in their shapes
    begin: Callable[[], None] | None = None  # queues what the steps need before the first one; None = nothing


@dataclass(frozen=True)
class PrefixContext:
    """What the actions of one request attend to, on the device.

    Valid until the next request.
    """

    tensors: Mapping[str, Tensor]  # outputs of the prefix engine and inputs of the actions alone, by name
    dims: Mapping[str, int]  # values of the symbols in their shapes, and of others


@dataclass(frozen=True)
class Guidance:
    """A second context, which lacks what the actions are to follow.

    The velocity becomes (1 - weight) times the one with this context plus weight times the one with the first
    context (equation 6 of arXiv 2311.13443).
    """

    context: Any
    weight: float


class ActionHead(Protocol):
    """One kind of head with its configuration."""

    @property
    def config(self) -> SampledConfig:
        """What `config.json` of the engine directory has under `action`."""
        ...

    @property
    def space(self) -> ActionSpace: ...

    @property
    def sampler(self) -> Sampler:
        """The steps from noise to actions."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Actions of a chunk, and values of an action as the model has them."""
        ...

    def bind(self, context: Any) -> BoundContext:
        """Return the engine's inputs of a request's context."""
        ...
