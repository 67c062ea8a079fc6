# SPDX-License-Identifier: Apache-2.0
"""`python -m edgellm_ros`: the same as the command `edgellm`."""

import signal
import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Run the command and return its exit code.

    Ctrl-C ends the command with 130, during the first imports too.
    """
    try:
        from edgellm_ros import cli

        code = cli.main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    # From here a Ctrl-C would replace the exit code: Python restores the default action while it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
