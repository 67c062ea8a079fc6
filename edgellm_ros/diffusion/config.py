# SPDX-License-Identifier: Apache-2.0
"""Configuration of an action head: shape, action space, trajectory history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import ACTConfig, Pi0Config, Pi05Config, SmolVLAConfig, XVLAConfig
from edgellm_ros.echo import quoted


@dataclass(frozen=True)
class ActionSpaceConfig:
    """Meaning of the action head's outputs.

    Actions are `value * std + mean`, clipped to [low, high]. All tuples have one entry per action dimension.
    """

    type: str  # "unicycle"
    names: tuple[str, ...]  # ("acceleration", "curvature")
    units: tuple[str, ...]  # of the physical actions
    dt: float  # seconds per action
    horizon: int  # actions of a trajectory
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...]  # the robot's limits, in `units`
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.type != "unicycle":
            raise ValueError(f"action space type must be 'unicycle', got {quoted(self.type)}")
        if self.names != ("acceleration", "curvature"):
            names = quoted(self.names)
            raise ValueError(f"a unicycle's names are ('acceleration', 'curvature'), got {names}")
        for name in ("units", "mean", "std", "low", "high"):
            if len(getattr(self, name)) != len(self.names):
                raise ValueError(f"{name} must have {len(self.names)} values, got {getattr(self, name)}")
        if self.dt <= 0 or self.horizon < 1:
            raise ValueError(
                f"dt must be positive and horizon at least 1, got dt={self.dt}, horizon={self.horizon}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low must be below high, got low={self.low}, high={self.high}")

    @property
    def dim(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class TrajectoryHistoryConfig:
    """Conversion of past positions to tokens, by quantisation to bins."""

    num_points: int  # of one history
    dt: float  # seconds between points
    axes: tuple[str, ...]  # ("x", "y") or ("x", "y", "z")
    low: tuple[float, ...]  # metres, value of the first bin, per axis
    high: tuple[float, ...]  # metres, value of the last bin, per axis
    num_tokens: int  # number of bins
    first_token_id: int  # bin b is the token `first_token_id + b`
    # Whether bins are computed in fp32, as by Alpamayo, or in fp64: values in the middle between two bins,
    # such as those of a robot that stands, differ.
    single_precision: bool

    def __post_init__(self) -> None:
        if self.axes not in (("x", "y"), ("x", "y", "z")):
            raise ValueError(f"axes must be ('x', 'y') or ('x', 'y', 'z'), got {quoted(self.axes)}")
        if self.num_points < 2 or self.dt <= 0 or self.num_tokens < 2 or self.first_token_id < 0:
            raise ValueError(
                "num_points and num_tokens must be at least 2, dt positive, first_token_id not negative, got "
                f"{self.num_points}, {self.num_tokens}, {self.dt}, {self.first_token_id}"
            )
        if len(self.low) != len(self.axes) or len(self.high) != len(self.axes):
            raise ValueError(
                f"low and high must have {len(self.axes)} values, got {self.low} and {self.high}"
            )
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low must be below high, got low={self.low}, high={self.high}")

    @property
    def length(self) -> int:
        """Number of tokens of one history."""
        return self.num_points * len(self.axes)


@dataclass(frozen=True)
class ActionConfig:
    """A flow-matching expert that attends to the language model's KV cache.

    The number of KV heads and the head size must be the same as in the language model, because both use one
    KV cache.
    """

    has_flow: ClassVar[bool] = True

    kind: Literal["flow_expert"] = field(default="flow_expert", kw_only=True)
    num_hidden_layers: int
    kv_caches: tuple[int, ...]  # which of the language model's caches each layer reads, from 0
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_denoise_steps: int  # default number of Euler steps
    future_start_token_id: int  # the stop token that triggers the action head
    history_token_id: int  # the placeholder that trajectory-history tokens replace
    action_space: ActionSpaceConfig
    trajectory_history: TrajectoryHistoryConfig
    rtc_max_delay: int  # most first actions that it was trained to continue (real-time chunking); 0 = none
    takes_navigation: bool  # whether prompts may have an instruction of navigation, which can guide actions

    def __post_init__(self) -> None:
        for name in (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_denoise_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.kv_caches) != self.num_hidden_layers or min(self.kv_caches) < 0:
            raise ValueError(
                f"kv_caches must have a cache for each of {self.num_hidden_layers} layers, "
                f"got {list(self.kv_caches)}"
            )
        if not 0 <= self.rtc_max_delay <= self.action_space.horizon:
            raise ValueError(
                f"rtc_max_delay must be from 0 to {self.action_space.horizon}, the actions of a chunk, "
                f"got {self.rtc_max_delay}"
            )
        for name in ("future_start_token_id", "history_token_id"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


# Of all kinds of action heads; in `config.json` the key `kind` chooses one.
ActionHeadConfig = (
    ActionConfig
    | SmolVLAConfig
    | Pi0Config
    | Pi05Config
    | GrootConfig
    | XVLAConfig
    | ACTConfig
    | DiffusionConfig
    | OpenPiConfig
)
