# SPDX-License-Identifier: Apache-2.0
"""Workers of a Ray cluster give the same results as local processes.

Ray is installed by `make parity`.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from edgellm_ros.evaluation.ray_workers import RayCluster
from edgellm_ros.evaluation.spreading import spread
from edgellm_ros.evaluation.task import WorkerError
from fixtures.evaluation_tasks import Squares, begun

pytest.importorskip("ray")
pytestmark = [pytest.mark.parity, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    with RayCluster("") as cluster:
        yield cluster


def run(cluster: RayCluster, task: Squares, count: int) -> dict[str, object]:
    done: dict[str, object] = {}

    def keep(item, outcome):
        assert item not in done
        done[item] = outcome.get("result", outcome)

    spread([str(number) for number in range(6)], partial(cluster.start, task), count, keep)
    return done


def test_killed_actors_change_no_result(cluster, tmp_path):
    done = run(cluster, Squares(tmp_path, killed=("3",), failing="5"), 2)
    squares = {str(number): number**2 for number in range(5)}
    assert done == {**squares, "5": {"failed": "ZeroDivisionError: by zero"}}
    entries = begun(tmp_path)
    assert sorted(item for item, _, _ in entries) == ["0", "1", "2", "3", "3", "4", "5"]
    assert {thread for _, _, thread in entries} == {"MainThread"}  # which alone can handle signals
    assert str(os.getpid()) not in {pid for _, pid, _ in entries}


def test_a_task_that_cannot_be_opened_is_bad_input(cluster, tmp_path):
    with pytest.raises(ValueError, match="no such engine"):
        run(cluster, Squares(tmp_path, unusable=True), 1)


def test_a_bug_ends_the_evaluation_with_its_traceback(cluster, tmp_path):
    with pytest.raises(WorkerError, match=r'(?s)Traceback.*raise KeyError\("missing"\)'):
        run(cluster, Squares(tmp_path, broken="1"), 1)


def test_sigterm_keeps_its_handler(cluster):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_cluster_has_room_for_as_many_workers_as_it_has_cores(cluster, tmp_path):
    task = Squares(tmp_path)
    assert cluster.room_for(task) == os.cpu_count()
