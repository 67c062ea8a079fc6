# SPDX-License-Identifier: Apache-2.0
"""TensorRT: plans and their profiles."""
