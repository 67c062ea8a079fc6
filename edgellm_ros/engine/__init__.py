# SPDX-License-Identifier: Apache-2.0
"""Tensors, devices and engine execution, independent of models and features."""
