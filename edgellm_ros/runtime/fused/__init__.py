# SPDX-License-Identifier: Apache-2.0
"""Fused decoding: decode steps in CUDA kernels of our own, in place of ONNX Runtime's.

Prefills stay with ONNX Runtime, on the same weights and the same KV cache.
"""
