# SPDX-License-Identifier: Apache-2.0
"""Rewrites a finished graph for a CPU."""
