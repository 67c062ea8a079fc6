# SPDX-License-Identifier: Apache-2.0
"""Episodes in process, as items of `edgellm evaluate arm`, and their report."""
