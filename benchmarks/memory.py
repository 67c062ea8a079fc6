# SPDX-License-Identifier: Apache-2.0
"""What a process has allocated, to the byte: resident memory does not tell it from what malloc keeps."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass

from edgellm_ros.ros.node.metrics import resident_memory


@dataclass(frozen=True)
class Memory:
    """Bytes of a process: `allocated` from malloc and not freed; `free` in what malloc holds; and `outside`
    of that, but resident: code, stacks, what is mapped (less than 0 if malloc holds more than is resident).
    """

    allocated: int
    free: int
    outside: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def read_memory() -> Memory:
    """Of this process, without garbage. Python's small objects count only with PYTHONMALLOC=malloc.

    RuntimeError without glibc 2.33.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise RuntimeError("there is no mallinfo2: this needs Linux with glibc 2.33") from None
    gc.collect()
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    outside = resident_memory() - info.arena - info.hblkhd
    return Memory(info.uordblks + info.hblkhd, info.fordblks, outside)
