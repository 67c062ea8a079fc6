# SPDX-License-Identifier: Apache-2.0
"""Episodes of the arm as items of an evaluation: each is named by its seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from edgellm_ros.builder.export_cache import export_if_needed
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.task import Outcome, Run, engine_digest
from edgellm_ros.ros.arm.contract import check_policy
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_tabletop.episodes.closed_loop import Driver, delay_in_steps, goal_of, play
from edgellm_tabletop.episodes.drivers import DATASET, ArmInProcess, ExpertDriver, PolicyDriver, contract
from edgellm_tabletop.episodes.robot import START_NS, TICK_NS, Robot
from edgellm_tabletop.episodes.summary import describe, summarise, times_of
from edgellm_tabletop.world import Tabletop

MEASURED = ("plan_seconds", "node_seconds")  # of an episode, by the computer's clock


def export_policy(
    checkpoint: Path, engine_dir: Path, status: Callable[[str], None], precision: str = "fp32"
) -> EngineConfig:
    """Export the policy if needed.

    Raises the errors of an export, and ValueError for a policy that is not one for this arm.
    """
    config = export_if_needed(
        checkpoint,
        engine_dir,
        lambda: status(f"exporting {checkpoint} to {engine_dir} ..."),
        precision=precision,
        dataset=DATASET,
    )
    check_policy(contract(), config.policy)
    return config


@dataclass(frozen=True)
class ArmTask:
    """Plays episodes with an engine, or with the scripted controller.

    Equal options give equal results on computers of one kind.
    """

    engine_dir: Path | None  # None: the scripted controller
    engine: str  # digest of the engine directory
    device: str
    threads: int  # part of the options: it changes the order of summation in some products
    delay: float  # s, from a frame to its chunk
    blend: float  # s, from a chunk to the next
    follow_time: float  # s, of a chunk; the arm then rests until the next. 0: it is followed until the next
    workers: int  # that are at work at the same time

    failures: ClassVar = (EngineError,)
    environment: ClassVar[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    @property
    def cores(self) -> int:
        """Return the number of cores that one worker keeps busy."""
        return self.threads

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that one worker needs."""
        return int(self.device != "cpu" and self.engine_dir is not None)

    @contextmanager
    def open(self) -> Iterator[Run]:
        """Load the engine.

        ValueError if it is not that of the evaluation.
        """
        with ExitStack() as opened:
            runtime = None
            if self.engine_dir is not None:
                if engine_digest(self.engine_dir) != self.engine:
                    raise ValueError(f"{self.engine_dir}: not the engine with which the evaluation began")
                runtime = opened.enter_context(
                    LLMInferenceRuntime(self.engine_dir, self.device, threads=self.threads)
                )
            world = Tabletop()
            opened.callback(world.close)

            def run(item: str) -> Outcome:
                robot, seed = Robot(world, START_NS + TICK_NS), int(item)
                robot.reset(seed, goal_of(seed))
                arm = ArmInProcess(robot, self.delay, self.blend, self.follow_time)
                driver: Driver = ExpertDriver(robot, arm)
                if runtime is not None:
                    driver = PolicyDriver(robot, arm, runtime, seed)
                outcome = play(robot, driver, delay_in_steps(self.delay), at_rest=self.follow_time > 0)
                result = describe(robot, seed, outcome)
                measured = {name: result.pop(name) for name in MEASURED}
                return {"result": result, "measured": {**measured, "workers": self.workers}}

            yield run


def summarise_results(results: Results, items: Sequence[str]) -> dict[str, Any]:
    """Summarise the episodes `items` that are finished, in their order.

    All values but those under `measured` follow from the items and the options.
    """
    found = [results.finished[item] for item in items if item in results.finished]
    rows = [outcome["result"] for outcome in found]
    measured = [outcome["measured"] for outcome in found]
    return {
        "evaluation": results.kind,
        "options": results.options,
        **summarise(rows),
        "unfinished": {item: results.failed.get(item) for item in items if item not in results.finished},
        "drives": rows,
        "measured": {**times_of(measured), "workers": sorted({each["workers"] for each in measured})},
    }
