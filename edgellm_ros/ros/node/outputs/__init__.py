# SPDX-License-Identifier: Apache-2.0
"""Output topics, and the markers and overlays that they show."""
