# SPDX-License-Identifier: Apache-2.0
"""Policies: engines that answer with actions only."""
