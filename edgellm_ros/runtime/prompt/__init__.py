# SPDX-License-Identifier: Apache-2.0
"""Convert requests to token ids and positions, and token ids to text."""
