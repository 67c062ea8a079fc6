# SPDX-License-Identifier: Apache-2.0
"""Settings of Python for a process that has loaded an engine and then answers for hours.

By default two things hold all threads of a process, in the middle of a chunk or between two tokens:

- A full garbage collection visits every object: 36 ms for the 46,000 of the demo's runtime.
- A thread that computes in Python goes on for 5 ms after another one wants to: a client's long prompt is
  prepared while the next step should be queued, with several calls of a GPU's driver, each of which may wait.
"""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0001  # after which a thread lets another one go on

_default_switch_s = sys.getswitchinterval()


def begin_long_run() -> None:
    """Leave all loaded objects out of later collections, and let threads switch often.

    `end_long_run` undoes both.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def end_long_run() -> None:
    """Let collections visit all objects again, so that what was loaded can be freed."""
    gc.unfreeze()
    sys.setswitchinterval(_default_switch_s)
