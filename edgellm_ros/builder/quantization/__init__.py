# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 and 8 bits: readers of published layouts, and the graphs of their products.

Each layout turns a layer's tensors into one `QuantizedMatrix`. A layer without such tensors stays as it is,
whatever the config says of it: lists of excluded layers are spelled in many ways, tensors in one.
"""
