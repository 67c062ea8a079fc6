# SPDX-License-Identifier: Apache-2.0
"""Exact memory of a process, as malloc reports it.

Resident memory also includes what malloc keeps free.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass

from edgellm_ros.ros.node.metrics import resident_memory


@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes."""

    allocated: int  # taken from malloc and not freed
    free: int  # held by malloc and free
    outside: int  # resident memory less what malloc holds: code, stacks, mappings; may be negative


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def read_memory() -> Memory:
    """Read the memory of this process after a garbage collection.

    Python's small objects are included only with PYTHONMALLOC=malloc. RuntimeError without glibc 2.33.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise RuntimeError(
            "mallinfo2 is missing: this benchmark needs Linux with glibc 2.33 or later"
        ) from None
    gc.collect()
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    outside = resident_memory() - info.arena - info.hblkhd
    return Memory(info.uordblks + info.hblkhd, info.fordblks, outside)
