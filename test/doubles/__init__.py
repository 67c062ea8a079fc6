# SPDX-License-Identifier: Apache-2.0
"""Stand-ins: a device that defers its work, TensorRT, CUDA kernels compiled for the host."""
