# SPDX-License-Identifier: Apache-2.0
"""Reads image, sound, video and number files. Every error names the file."""
