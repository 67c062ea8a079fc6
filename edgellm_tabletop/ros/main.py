# SPDX-License-Identifier: Apache-2.0
"""Starts the world as a process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgellm_ros.ros.signals import end_on_signal


def main(args: Sequence[str] | None = None) -> int:
    """Play the episodes, and return the exit code.

    `args` as on the command line. A signal during the imports ends the process.
    """
    end_on_signal()
    from edgellm_tabletop.ros.tabletop_node import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
