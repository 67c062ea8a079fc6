# SPDX-License-Identifier: Apache-2.0
"""What commands do with the arm: `edgellm demo --arm` and `edgellm evaluate arm`."""
