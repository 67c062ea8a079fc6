# SPDX-License-Identifier: Apache-2.0
"""A request to token ids and positions, and token ids back to text."""
