# SPDX-License-Identifier: Apache-2.0
"""TensorRT and TensorRT for RTX: libraries, plans and the backend."""
