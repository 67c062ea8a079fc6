# SPDX-License-Identifier: Apache-2.0
"""Fused decoding: decode steps and verifications in CUDA kernels of our own, not ONNX Runtime's.

Prefills stay with ONNX Runtime, on the same weights and the same KV cache.
"""
