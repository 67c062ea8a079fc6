# SPDX-License-Identifier: Apache-2.0
"""Servers around a runtime."""
