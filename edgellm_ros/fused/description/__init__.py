# SPDX-License-Identifier: Apache-2.0
"""Files of an engine directory that describe its parts for the fused kernels."""
