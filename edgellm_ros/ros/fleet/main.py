# SPDX-License-Identifier: Apache-2.0
"""Starts the nodes of a fleet as one process: `edgellm_fleet NAMESPACE ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgellm_ros.ros.signals import end_on_signal


def main(args: Sequence[str] | None = None) -> int:
    """Run the nodes until a signal comes, and return the exit code.

    `args` as on the command line. A signal during the imports ends the process.
    """
    end_on_signal()
    from edgellm_ros.ros.fleet.process import run

    return run(sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
