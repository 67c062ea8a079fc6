# SPDX-License-Identifier: Apache-2.0
"""Evaluations: what they do, and their execution by local processes or Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgellm_ros.engine.onnxruntime.session import available_cores
from edgellm_ros.evaluation.progress import Progress
from edgellm_ros.evaluation.results_file import Results, ResultsFile
from edgellm_ros.evaluation.spreading import Worker, spread
from edgellm_ros.evaluation.task import Outcome, Task


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one kind of evaluation does."""

    kind: str
    options: Mapping[str, Any]  # that results depend on
    items: Sequence[str]
    task: Callable[[int], Task]  # for a number of workers
    word: Callable[[Outcome], str]  # for an outcome, which the progress counts
    summarise: Callable[[Results, Sequence[str]], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str]
    draw: Callable[[Path, Results, Mapping[str, Any]], None]  # the picture, to a file


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
        start: Callable[[], Worker]
        if spreading.ray is None:
            from edgellm_ros.evaluation.local_workers import LocalWorker

            one = task(1)
            count = spreading.processes or (1 if one.gpus else max(1, available_cores() // one.cores))
            count = min(count, len(left))
            start = partial(LocalWorker, task(count))
        else:
            from edgellm_ros.evaluation.ray_workers import RayCluster

            cluster = stack.enter_context(RayCluster(spreading.ray))
            count = min(spreading.processes or cluster.room_for(task(1)), len(left))
            start = partial(cluster.start, task(count))
        progress.status(f"starting {count} worker{'s' if count > 1 else ''} ...")
        spread(left, start, count, done)
