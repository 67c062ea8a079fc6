# SPDX-License-Identifier: Apache-2.0
"""What a decoder is made of, described once: blocks and layers.

No graph is built here.
"""
