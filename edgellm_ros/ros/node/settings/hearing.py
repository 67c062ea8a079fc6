# SPDX-License-Identifier: Apache-2.0
"""The parameters `hearing.*`."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.hearing.rule import HearingRule
from edgellm_ros.runtime.transcript import language_name


@dataclass(frozen=True)
class HearingSettings(HearingRule):
    """The node's parameters `hearing.*`.

    ValueError for an unknown language, and for values that `HearingRule` refuses.
    """

    language: str = ""  # English name or code; "" = found by the model
    context: str = ""  # words that may be said
    partial_interval: float = 0.0  # s between two transcripts of the speech so far; 0 = none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language:
            language_name(self.language)
