# SPDX-License-Identifier: Apache-2.0
"""Text to tokens, and tokens to text."""
