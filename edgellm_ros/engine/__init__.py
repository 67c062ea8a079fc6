# SPDX-License-Identifier: Apache-2.0
"""Tensors, devices and engine execution. Knows no models, phases or features."""
