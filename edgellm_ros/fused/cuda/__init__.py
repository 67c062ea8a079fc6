# SPDX-License-Identifier: Apache-2.0
"""Compiles and launches the kernels; needs NVRTC and a GPU."""
