# SPDX-License-Identifier: Apache-2.0
"""The export: reads a checkpoint, plans all files and writes them."""
