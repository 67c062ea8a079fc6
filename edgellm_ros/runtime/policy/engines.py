# SPDX-License-Identifier: Apache-2.0
"""PolicyEngines: how one form of policy computes actions.

`FlowEngines`, `DiffusionEngines` and `DirectEngine` are the forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgellm_ros.runtime.metrics import StageClock
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest


class PolicyEngines(Protocol):
    """The engines of a policy, for one request at a time."""

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        """Return the tokens of a request's task; none if the policy has no text.

        state [1, model_dim]: normalised. ValueError for a field that this form of policy cannot heed.
        """
        ...

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        """Return the number of rows that actions attend to.

        ValueError for images that do not fit the engine.
        """
        ...

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        """Compute normalised actions [n,T,A] float32; None if the request is cancelled.

        Each stage is reported to the sequence before it runs and timed with the clock. EngineError if actions
        are not finite.
        """
        ...
