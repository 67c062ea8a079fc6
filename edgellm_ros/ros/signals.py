# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process: while it starts, in order, and at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal signals the whole process group, and `ros2 launch` or another supervisor signals its children
# again: signals this close together count as one.
SAME_REQUEST_S = 2.0


def end_on_signal() -> None:
    """End the process at SIGINT or SIGTERM, with exit code 0 and without a traceback.

    For its first imports, which take seconds and have nothing to end in order.
    """
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os._exit(0))


def restore_signals() -> None:
    """Let SIGINT and SIGTERM do again what they do in Python."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def call_on_signal(callback: Callable[[], None]) -> None:
    """Call `callback` from another thread at the first SIGINT or SIGTERM.

    To be called from the main thread. Signals within the next 2 s are ignored; a later one ends the process
    at once with exit code 128 + signal. While the main thread is inside the middleware or a library that
    loads engines, Python's own handlers do not run: a thread reads the wakeup file descriptor, to which the C
    handler writes on any thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, writer, callback), name="signals", daemon=True).start()


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM for the rest of the process; its exit code is decided.

    Python restores the default actions while it ends: a late signal would replace the exit code.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _watch(reader: socket.socket, writer: socket.socket, callback: Callable[[], None]) -> None:
    """Read the numbers of arriving signals.

    The reference to `writer` prevents its closing.
    """
    with reader, writer:
        _next_signal(reader)
        first = time.monotonic()
        callback()
        while True:
            number = _next_signal(reader)
            if time.monotonic() > first + SAME_REQUEST_S:
                print(f"ended by a second {signal.Signals(number).name}", file=sys.stderr, flush=True)
                os._exit(128 + number)


def _next_signal(reader: socket.socket) -> int:
    while True:
        number = reader.recv(1)[0]
        if number in SIGNALS:  # other signals with a Python handler are written too
            return number
