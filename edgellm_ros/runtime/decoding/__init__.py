# SPDX-License-Identifier: Apache-2.0
"""Decoding: the loop over steps, decode methods, and recorded steps."""
