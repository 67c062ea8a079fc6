# SPDX-License-Identifier: Apache-2.0
"""Recorded bags played into the live node, and outputs compared."""
