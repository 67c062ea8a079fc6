# SPDX-License-Identifier: Apache-2.0
"""One view of the node's parameters for all of its parts."""

from __future__ import annotations

from edgellm_ros.ros.node.settings.parameters import Parameters


class LiveParameters:
    """The present parameters, shared by all parts. Only the node calls `update`."""

    def __init__(self, parameters: Parameters) -> None:
        self._current = parameters

    @property
    def current(self) -> Parameters:
        """The present values: an immutable snapshot."""
        return self._current

    def update(self, parameters: Parameters) -> None:
        """Replace the values for all parts."""
        self._current = parameters
