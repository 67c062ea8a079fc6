# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: sessions and the backend."""
