# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: safetensors, JSON values, weights in strips."""
