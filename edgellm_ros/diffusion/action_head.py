# SPDX-License-Identifier: Apache-2.0
"""ActionHead: the interface of action heads.

`ActionRunner` samples actions of a head. Every kind of head has an engine that computes velocities:

- in: `trajectory [n,T,A]`, the actions of n samples; `time [N]`, one time for all actions or one for each;
  and what the head binds, such as KV caches or the keys and values of a prefix
- out: `velocity [n,T,A]`, the derivative of the trajectory with respect to the time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

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


class FlowConfig(HeadConfig, Protocol):
    """What the configurations of all kinds with a flow have."""

    @property
    def num_denoise_steps(self) -> int:
        """Default number of Euler steps."""
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
class FlowTime:
    """The time of the flow as the model counts it: at the noise, and at the actions."""

    noise: float
    actions: float

    @property
    def direction(self) -> float:
        """Return how much the model's time changes on the whole way, with its sign."""
        return self.actions - self.noise

    def at(self, share: Any) -> Any:
        """Return the time after a share of the way from the noise to the actions."""
        return self.noise + self.direction * share

    def factors(self, factors: np.ndarray) -> np.ndarray:
        """Convert factors [steps,3,T] to those of the model's time.

        The factors are those of `Kernels.conditioned_step`. They are strength and pull of a step of positive
        size, and the next times from 0 (noise) to 1.
        """
        strength, pull, next_times = np.moveaxis(factors, 1, 0)
        return np.stack([strength * np.float32(self.direction), pull, self.at(next_times)], axis=1)


NOISE_AT_0 = FlowTime(0.0, 1.0)
NOISE_AT_1 = FlowTime(1.0, 0.0)


@dataclass(frozen=True)
class BoundContext:
    """The velocity engine's inputs that stay the same in all Euler steps.

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
    rows: int  # S of their shapes


class ActionHead(Protocol):
    """One kind of head with its configuration."""

    @property
    def config(self) -> FlowConfig:
        """What `config.json` of the engine directory has under `action`."""
        ...

    @property
    def space(self) -> ActionSpace: ...

    @property
    def flow(self) -> FlowTime:
        """The direction of the model's time."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Actions of a chunk, and values of an action as the model has them."""
        ...

    def bind(self, context: Any) -> BoundContext:
        """Return the engine's inputs of a request's context."""
        ...
