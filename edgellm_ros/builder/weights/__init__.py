# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint and of its adapters, and checks of their shapes."""
