# SPDX-License-Identifier: Apache-2.0
"""Reads EAGLE-3 draft heads and builds their graphs.

A head is a decoder of one layer, or a few, that drafts the tokens which the language model, the base, then
verifies in one run (docs/engine_directory.md, "Draft heads"). `head.py` reads a head, whatever names its
publisher gave to the tensors (`layout.py`); `builder/graph/fusion.py` is the part of a head
that runs with the base, and `graph.py` the part that runs alone.
"""
