# SPDX-License-Identifier: Apache-2.0
"""Executes what is left of an evaluation, in local processes or on a Ray cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from edgellm_ros.engine.onnxruntime_session import available_cores
from edgellm_ros.evaluation.progress import Progress
from edgellm_ros.evaluation.results_file import ResultsFile
from edgellm_ros.evaluation.spreading import Workers, spread
from edgellm_ros.evaluation.task import Outcome, Task


@dataclass(frozen=True)
class Spreading:
    """Where the items of an evaluation are executed."""

    processes: int | None = None  # workers at a time; None: as many as the task's cores and GPUs allow
    ray: str | None = None  # address of a cluster, "" for the default one; None: processes of this computer


def execute(
    task: Callable[[int], Task],
    items: Sequence[str],
    file: ResultsFile,
    spreading: Spreading,
    progress: Progress,
    describe: Callable[[Outcome], str],
) -> None:
    """Execute the items that the file lacks, and write their outcomes.

    task: makes the task for a number of workers. describe: a word for an outcome, which the progress counts.
    ValueError or WorkerError if workers cannot begin, ImportError for a cluster without Ray.
    """
    left = [item for item in items if item not in file.finished]
    if not left:
        return
    words = Counter(describe(file.finished[item]) for item in items if item in file.finished)

    def done(item: str, outcome: Outcome) -> None:
        if file.add(item, outcome):
            words["failed" if "failed" in outcome else describe(outcome)] += 1
            progress.advance(", ".join(f"{count} {word}" for word, count in sorted(words.items())))

    with ExitStack() as stack:
        workers: Workers
        if spreading.ray is None:
            from edgellm_ros.evaluation.local_workers import LocalWorkers

            one = task(1)
            count = spreading.processes or (1 if one.gpus else max(1, available_cores() // one.cores))
            count = min(count, len(left))
            workers = stack.enter_context(LocalWorkers(task(count)))
        else:
            from edgellm_ros.evaluation.ray_workers import RayCluster

            cluster = stack.enter_context(RayCluster(spreading.ray))
            count = min(spreading.processes or cluster.room_for(task(1)), len(left))
            workers = stack.enter_context(cluster.workers(task(count)))
        progress.status(f"starting {count} worker{'s' if count > 1 else ''} ...")
        spread(left, workers, count, done)
