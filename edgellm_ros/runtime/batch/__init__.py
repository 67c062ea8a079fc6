# SPDX-License-Identifier: Apache-2.0
"""The sequences of a batch, and all state per sequence."""
