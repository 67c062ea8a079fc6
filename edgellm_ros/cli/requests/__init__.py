# SPDX-License-Identifier: Apache-2.0
"""Requests in files and on the command line, and their answers."""
