# SPDX-License-Identifier: Apache-2.0
"""Test doubles: a device that defers its work, TensorRT, CUDA kernels on the host."""
