# SPDX-License-Identifier: Apache-2.0
"""Configuration of a policy that another computer runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import quoted


@dataclass(frozen=True)
class OpenPiConfig(PolicyConfig):
    """A policy on another computer, which is asked by openpi's protocol.

    Actions and state are sent in physical units, so their statistics change nothing.
    """

    url: str  # ws://HOST:PORT
    token_file: str  # "" = no token
    image_keys: tuple[str, ...]  # of the cameras
    image_size: tuple[int, ...]  # height and width that frames are resized to; () = they are sent as they are
    state_keys: tuple[str, ...]  # parts of the state, in order
    state_sizes: tuple[int, ...]  # values of each part
    prompt_key: str
    timeout_s: float  # to wait for actions, a new connection included
    kind: Literal["openpi"] = field(default="openpi", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("ws://", "wss://")):
            raise ValueError(f"url must begin with ws:// or wss://, got {quoted(self.url)}")
        if len(self.image_keys) != len(self.cameras.names):
            raise ValueError(f"image_keys must have {len(self.cameras.names)} keys, got {self.image_keys}")
        if self.image_size and (len(self.image_size) != 2 or not all(0 < n <= 4096 for n in self.image_size)):
            raise ValueError(f"image_size must be height and width from 1 to 4096, got {self.image_size}")
        values = 0 if self.state is None else self.state.dim
        if len(self.state_keys) != len(self.state_sizes) or sum(self.state_sizes) != values:
            raise ValueError(f"state_sizes must make up {values} values, got {self.state_sizes}")
        if not 0 < self.timeout_s <= 600:
            raise ValueError(f"timeout_s must be above 0 and at most 600, got {self.timeout_s}")
        if any(self.action_space.relative):
            raise ValueError("relative must be false: the other computer adds the state")

    @property
    def max_prefix_rows(self) -> int:
        """Return the number of images, which are all that is known of the rows."""
        return max(2, len(self.cameras.names))
