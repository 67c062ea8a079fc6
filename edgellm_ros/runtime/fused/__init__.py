# SPDX-License-Identifier: Apache-2.0
"""Fused decoding: decode steps and verifications in our own CUDA kernels.

These replace ONNX Runtime's kernels. Prefills stay with ONNX Runtime, on the same weights and the same KV
cache.
"""
