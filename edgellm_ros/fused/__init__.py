# SPDX-License-Identifier: Apache-2.0
"""The fused backend: CUDA kernels of our own for steps of few tokens (README.md)."""
