# SPDX-License-Identifier: Apache-2.0
"""From camera frames and sound to rows of embeddings."""
