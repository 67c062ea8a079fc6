# SPDX-License-Identifier: Apache-2.0
"""The parameters `hearing.*`."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.hearing.rule import HearingRule
from edgellm_ros.runtime.transcript import language_name


@dataclass(frozen=True)
class HearingSettings:
    """The node's parameters `hearing.*`.

    ValueError for an unknown language, and for values that `HearingRule` refuses.
    """

    language: str = ""  # English name or code; "" = found by the model
    context: str = ""  # words that may be said
    min_confidence: float = HearingRule.min_confidence
    max_letters_per_second: float = HearingRule.max_letters_per_second
    wake_word: str = ""
    partial_interval: float = 0.0  # s between two transcripts of the speech so far; 0 = none

    def __post_init__(self) -> None:
        if self.language:
            language_name(self.language)
        self.rule  # noqa: B018

    @property
    def rule(self) -> HearingRule:
        return HearingRule(self.min_confidence, self.max_letters_per_second, self.wake_word)
