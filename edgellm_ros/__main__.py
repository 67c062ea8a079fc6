# SPDX-License-Identifier: Apache-2.0
"""`python -m edgellm_ros`: the same as the command `edgellm`."""

import sys

from edgellm_ros.cli import main

if __name__ == "__main__":
    sys.exit(main())
