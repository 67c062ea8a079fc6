# SPDX-License-Identifier: Apache-2.0
"""Keeps what a server has loaded out of Python's garbage collections.

A full collection visits every object while all threads wait: 36 ms for the 46,000 of the demo's runtime, in
the middle of a chunk or between two tokens.
"""

from __future__ import annotations

import gc


def leave_out_of_collections() -> None:
    """Collect garbage, and leave all that remains out of later collections.

    For processes that load an engine and then answer for hours. `collect_again` undoes it.
    """
    gc.collect()
    gc.freeze()


def collect_again() -> None:
    """Let collections visit all objects again, so that what was loaded can be freed."""
    gc.unfreeze()
