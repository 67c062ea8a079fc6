# SPDX-License-Identifier: Apache-2.0
"""What kernels are compiled for: shapes, tiles, CTAs, smem."""
