# SPDX-License-Identifier: Apache-2.0
"""The node's parameters, as one table and as typed values."""
