# SPDX-License-Identifier: Apache-2.0
"""GraphRecorder: captures graphs where that is possible.

Work that cannot be captured runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgellm_ros.engine.errors import DeviceLostError, EngineError


class GraphRecorder:
    """Captures graphs, best effort.

    After the first failure it captures no more while `active` is false.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active

    def capture(self, capture: Callable[[], Any | None], explain: Callable[[str], None]) -> Any | None:
        """Return the graph that `capture` makes; None if it makes none or fails.

        `explain` gets the reason of a failure. DeviceLostError if the device is lost: no work goes on then.
        """
        try:
            graph = capture()
        except DeviceLostError:
            raise
        except EngineError as error:
            graph = None
            explain(str(error))
        self.active = graph is not None
        return graph
