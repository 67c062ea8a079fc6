# SPDX-License-Identifier: Apache-2.0
"""From camera frames (and, later, sound) to rows of embeddings."""
