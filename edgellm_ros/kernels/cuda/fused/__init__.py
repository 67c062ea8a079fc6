# SPDX-License-Identifier: Apache-2.0
"""A decode step of a dense decoder, from embeddings to logits, in kernels of our own."""
