# SPDX-License-Identifier: Apache-2.0
"""The edgellm node with an additional thread that reports its allocated memory."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from dataclasses import astuple

from benchmarks.memory import Memory, read_memory
from edgellm_ros.ros.node.main import main

SOCKET = "EDGELLM_WATCHED_NODE"  # environment variable: path of the socket to listen on
ENVIRONMENT = {"PYTHONMALLOC": "malloc"}  # Python's small objects come from malloc too
_ANSWER = struct.Struct("@3q")


def ask_memory(path: str) -> Memory:
    """Request the memory of the watched node that listens at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return Memory(*_ANSWER.unpack(connection.recv(_ANSWER.size, socket.MSG_WAITALL)))


def _listen(path: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()

    def answer() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(_ANSWER.pack(*astuple(read_memory())))

    threading.Thread(target=answer, name="memory", daemon=True).start()


if __name__ == "__main__":
    _listen(os.environ[SOCKET])
    sys.exit(main())
