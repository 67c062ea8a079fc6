# SPDX-License-Identifier: Apache-2.0
"""Work that its caller stops waiting for."""

import threading

import pytest

from edgellm_ros.interruptible import THREADS, InterruptedWorkError, interruptible


def never() -> bool:
    return False


def test_the_result_of_the_work_is_returned():
    assert interruptible(lambda: 7, never) == 7


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("late")])
def test_an_error_of_the_work_is_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        interruptible(fail, never)


def test_the_caller_goes_on_while_stopped_work_still_runs():
    release, ended = threading.Event(), threading.Event()

    def work():
        release.wait(20)
        ended.set()

    with pytest.raises(InterruptedWorkError):
        interruptible(work, lambda: True)
    assert not ended.is_set()
    release.set()
    assert ended.wait(20)


def test_an_error_of_the_question_ends_the_waiting():
    release = threading.Event()

    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: release.wait(20), stopped)
    release.set()


def test_stopped_work_piles_up_no_threads_and_other_waiting_work_can_be_stopped():
    release, begun = threading.Event(), []
    for _ in range(3 * THREADS):
        with pytest.raises(InterruptedWorkError):
            interruptible(lambda: begun.append(0) or release.wait(20), lambda: True)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("edgellm-interruptible")]
    assert len(threads) <= THREADS
    assert len(begun) <= THREADS
    release.set()
    assert interruptible(lambda: 7, never) == 7
    assert len(begun) <= THREADS  # what had not begun was dropped
