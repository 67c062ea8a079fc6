# SPDX-License-Identifier: Apache-2.0
"""Blocks and decoders in ONNX Runtime's own operators."""
