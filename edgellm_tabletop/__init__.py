# SPDX-License-Identifier: Apache-2.0
"""The demo's second world: an SO-101 arm that places a block on a mark."""
