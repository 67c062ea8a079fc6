# SPDX-License-Identifier: Apache-2.0
"""The optional parts of an engine directory: encoders and action head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.sequence_checks import check_texts

VISUAL, AUDIO, ACTION = "visual", "audio", "action"  # names of their graphs
TITLES = {VISUAL: "vision encoder", AUDIO: "audio encoder", ACTION: "action head"}


@dataclass(frozen=True)
class EngineParts:
    """What an engine directory has, and what is left out when it is opened.

    without: of "visual", "audio", "action", to save memory; a part that the directory does not have may be
    named. ValueError for another name, and for a policy, which needs all of its parts.
    """

    config: EngineConfig
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_without(self.without)
        object.__setattr__(self, "without", tuple(name for name in TITLES if name in self.without))
        policy = self.config.policy
        if policy is not None and self.without:
            names = ", ".join(self.without)
            raise ValueError(f"a policy ({policy.kind}) needs all of its parts: leave out none of {names}")

    def missing(self, part: str) -> str:
        """Return why a part cannot be used; "" if it is there and opened."""
        config = self.config
        sight = config.vision or config.policy  # a policy sees with the graph of its prefix
        present = {VISUAL: sight, AUDIO: config.audio, ACTION: config.action}
        if present[part] is None:
            return f"this engine has no {TITLES[part]}"
        if part in self.without:
            return f"the {TITLES[part]} was left out when this engine directory was opened"
        return ""


def check_without(names: Sequence[str]) -> None:
    """Check names of parts to leave out. ValueError for the first one that is unknown."""
    for name in check_texts("without", names, "names"):
        if name not in TITLES:
            raise ValueError(f"without must be of {', '.join(TITLES)}, got {quoted(name)}")
