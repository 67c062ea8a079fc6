# SPDX-License-Identifier: Apache-2.0
"""FleetEngine: the engines that the nodes of a process share."""

from __future__ import annotations

import threading

from rclpy.impl.rcutils_logger import RcutilsLogger

from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.loaded_objects import leave_out_of_collections
from edgellm_ros.ros.node.engine_checks import check_before_loading
from edgellm_ros.ros.node.runtime_opening import close_runtime, open_engine, open_transcriber, prepare
from edgellm_ros.ros.node.settings.parameters import Parameters
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.sharing.shared_runtime import RuntimeShare, SharedRuntime

# Parameters of the engine, which are equal in all nodes that have it open.
OF_ENGINE = (
    "engine_dir",
    "device",
    "allow_plan_code",
    "without",
    "prefix_cache_mb",
    "prefix_cache_file",
    "drafting",
    "draft_top_k",
    "draft_steps",
    "verify_tree_size",
    "decode",
    "cuda_graphs",
    "tool_call_format",
)
ROWS_TO_DRIVE = 2  # plans at once by default: driving, and a goal beside it


class FleetEngine:
    """Opens the engine with the first node that is configured; thread-safe.

    With the last one that is cleaned up or shut down the engine is closed.
    """

    def __init__(self, robots: int) -> None:
        """Take the number of the robots, which divide the rows of the batch."""
        self._robots = robots
        self._lock = threading.Lock()
        self._shared: SharedRuntime | None = None
        self._parameters: Parameters | None = None  # with which the engine was opened
        self._speech: dict[str, SharedRuntime] = {}  # speech engines by their directories

    def open(self, parameters: Parameters, logger: RcutilsLogger) -> LLMInferenceRuntime:
        """Return a share of the engine for a node.

        Raises the errors of `open_runtime`; ValueError for parameters of the engine that differ from those of
        the other nodes, EngineError if the device was lost and other nodes have not been cleaned up.
        """
        with self._lock:
            is_first = self._shared is None or self._shared.runtime.closed
            if is_first:
                self._shared = SharedRuntime(open_engine(parameters, logger))
                self._parameters = parameters
            else:
                self._check(parameters)
            rows = self._shared.runtime.rows
            mine = max(rows // self._robots, min(rows, ROWS_TO_DRIVE))
            share = self._shared.share(parameters.share_weight, mine)
            try:
                prepare(share, parameters)
                if is_first and parameters.cuda_graphs:
                    share.capture_decoding_cuda_graph()  # adapters of later nodes: when they first run
            except BaseException:
                share.close()
                raise
            leave_out_of_collections()
            if is_first and rows < self._robots:
                logger.warning(
                    f"max_batch_size of the engine is {rows}, for {self._robots} robots: they wait for "
                    "each other"
                )
            return share

    def open_transcriber(self, parameters: Parameters) -> Transcriber | None:
        """Return a transcriber on the node's speech engine; None without the parameter.

        Nodes with one speech engine share it, and the last one closes it. Raises the errors of the function
        `open_transcriber`.
        """
        directory = parameters.speech_engine_dir
        with self._lock:
            shared = self._speech.get(directory)
            if shared is None or shared.runtime.closed:
                transcriber = open_transcriber(parameters)
                if transcriber is None:
                    return None
                shared = self._speech[directory] = SharedRuntime(transcriber.runtime)
            return Transcriber.on(shared.share())

    def close(self, share: RuntimeShare, parameters: Parameters, logger: RcutilsLogger) -> None:
        """Close a node's share.

        With the last one the prefix cache is saved, if a file is set, and the engine is freed.
        """
        with self._lock:
            if self._shared is not None and self._shared.shares == [share]:
                close_runtime(share, parameters, logger)
            else:
                share.close()

    def _check(self, parameters: Parameters) -> None:
        """Check that a node can join those that have the engine open."""
        if self._shared.is_lost:
            raise EngineError(
                "the device was lost: clean up the nodes of all robots, then configure them again"
            )
        for name in OF_ENGINE:
            own, others = getattr(parameters, name), getattr(self._parameters, name)
            if own != others:
                raise ValueError(
                    f"parameter {name} is {quoted(own)}, but other robots of this process have opened the "
                    f"engine with {quoted(others)}: they must be equal"
                )
        check_before_loading(parameters, EngineConfig.load(parameters.engine_dir))
