# SPDX-License-Identifier: Apache-2.0
"""From an engine directory to kernels that run, or the reason why not."""
