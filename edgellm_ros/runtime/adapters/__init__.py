# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, and their tensors for engines and kernels."""
