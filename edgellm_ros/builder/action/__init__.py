# SPDX-License-Identifier: Apache-2.0
"""Graphs of action experts, described for the fused kernels too."""
