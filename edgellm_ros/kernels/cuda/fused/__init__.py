# SPDX-License-Identifier: Apache-2.0
"""A decode step of a dense decoder in our own kernels, from embeddings to logits."""
