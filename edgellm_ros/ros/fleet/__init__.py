# SPDX-License-Identifier: Apache-2.0
"""Several robots in one process: a node per namespace, all on one runtime."""
