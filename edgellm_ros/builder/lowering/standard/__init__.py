# SPDX-License-Identifier: Apache-2.0
"""Blocks and decoders in ONNX's operators, for every backend."""
