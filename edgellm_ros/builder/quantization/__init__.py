# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 and 8 bits: readers of layouts and the graphs of their products.

The layouts are published ones. Each turns a layer's tensors into one `QuantizedMatrix`. A layer without such
tensors stays as it is, whatever the config says of it: lists of excluded layers are spelled in many ways,
tensors in one.
"""
