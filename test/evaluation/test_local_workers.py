# SPDX-License-Identifier: Apache-2.0
"""Workers in processes of their own."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from edgellm_ros.evaluation.local_workers import LocalWorker
from edgellm_ros.evaluation.spreading import Ended, spread
from edgellm_ros.evaluation.task import WorkerError
from fixtures.evaluation_tasks import Squares, begun
from fixtures.process_state import runs

pytestmark = pytest.mark.slow
ITEMS = [str(number) for number in range(6)]


def run(task: Squares, processes: int, items=ITEMS) -> dict[str, object]:
    done: dict[str, object] = {}

    def keep(item, outcome):
        assert item not in done
        done[item] = outcome.get("result", outcome)

    spread(items, partial(LocalWorker, task), processes, keep)
    return done


def test_results_do_not_depend_on_the_number_of_processes_nor_on_killed_ones(tmp_path):
    squares = {item: int(item) ** 2 for item in ITEMS}
    assert run(Squares(tmp_path, killed=("1", "4")), 2) == squares
    entries = begun(tmp_path)
    assert sorted(item for item, _, _ in entries) == sorted([*ITEMS, "1", "4"])
    assert len({pid for _, pid, _ in entries}) >= 3
    assert {thread for _, _, thread in entries} == {"MainThread"}  # which alone can handle signals
    assert "EDGELLM_TEST_VARIABLE" not in os.environ


def test_an_item_that_fails_or_kills_does_not_end_the_evaluation(tmp_path):
    done = run(Squares(tmp_path, deadly="0", failing="2"), 1, ITEMS[:4])
    assert done == {
        "0": {"failed": "3 workers ended with this item, the last one: killed by SIGKILL"},
        "1": 1,
        "2": {"failed": "ZeroDivisionError: by zero"},
        "3": 9,
    }


def test_a_worker_that_was_killed_in_the_middle_of_a_message_has_ended():
    ours, theirs = Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the beginning")
    theirs.close()
    worker = object.__new__(LocalWorker)
    worker._process = SimpleNamespace(join=lambda: None, exitcode=-signal.SIGKILL)
    worker._connection = ours
    with pytest.raises(Ended, match=r"^killed by SIGKILL$"):
        worker.open()


def test_a_task_that_cannot_be_opened_is_bad_input(tmp_path):
    with pytest.raises(ValueError, match="no such engine"):
        run(Squares(tmp_path, unusable=True), 2)


def test_a_bug_ends_the_evaluation_with_its_traceback(tmp_path):
    with pytest.raises(WorkerError, match=r'(?s)Traceback.*raise KeyError\("missing"\)'):
        run(Squares(tmp_path, broken="1"), 1)


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    code = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "sys.path.insert(0, 'test')\n"
        "from edgellm_ros.evaluation.local_workers import LocalWorker\n"
        "from edgellm_ros.evaluation.spreading import spread\n"
        "from fixtures.evaluation_tasks import Squares\n"
        "if __name__ == '__main__':\n"
        f"    task = Squares(Path({str(tmp_path)!r}), seconds=60)\n"
        "    spread(['1', '2'], partial(LocalWorker, task), 1, print)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "begun").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    while not begun(tmp_path):
        time.sleep(0.05)
    ((_, pid, _),) = begun(tmp_path)
    assert runs(int(pid))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while runs(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
