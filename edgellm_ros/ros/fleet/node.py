# SPDX-License-Identifier: Apache-2.0
"""FleetNode: the node `edgellm` of one robot of several, on their common engine."""

from __future__ import annotations

from typing import Any

from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.ros.fleet.engine import FleetEngine
from edgellm_ros.ros.node.node import EdgeLLMNode
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


class FleetNode(EdgeLLMNode):
    """An EdgeLLMNode whose runtime is a share of the fleet's."""

    def __init__(self, engine: FleetEngine, **kwargs: Any) -> None:
        """Make the node; `kwargs` are for LifecycleNode, with the namespace."""
        self._engine = engine
        super().__init__(**kwargs)

    def open_runtime(self) -> LLMInferenceRuntime:
        return self._engine.open(self.parameters, self.get_logger())

    def open_transcriber(self) -> Transcriber | None:
        return self._engine.open_transcriber(self.parameters)

    def close_runtime(self, runtime: LLMInferenceRuntime) -> None:
        self._engine.close(runtime, self.parameters, self.get_logger())
