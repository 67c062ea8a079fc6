# SPDX-License-Identifier: Apache-2.0
"""TurnLock: threads get it in the order in which they ask."""

import threading
import time

import pytest

from edgellm_ros.runtime.scheduling.turn_lock import TurnLock

WAIT_S = 20.0


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_threads_get_the_lock_in_the_order_in_which_they_ask():
    lock, order = TurnLock(), []
    threads = []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        assert not lock.is_wanted
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda: len(lock._waiting) == len(threads))
        assert lock.is_wanted
    with lock:  # asked last
        assert order == list(range(5))
    for thread in threads:
        thread.join(WAIT_S)
    assert not lock.is_wanted


def test_one_thread_at_a_time_has_the_lock():
    lock, inside, most = TurnLock(), [], []

    def work() -> None:
        for _ in range(200):
            with lock:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(most) == 800
    assert max(most) == 1


def test_an_error_inside_frees_the_lock():
    lock = TurnLock()
    with pytest.raises(RuntimeError, match="inside"), lock:
        raise RuntimeError("inside")
    with lock:
        assert not lock.is_wanted


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(monkeypatch):
    lock = TurnLock()

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    with lock:
        monkeypatch.setattr("edgellm_ros.runtime.scheduling.turn_lock.threading.Event", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
        assert not lock.is_wanted
    monkeypatch.undo()
    with lock:
        pass
