# SPDX-License-Identifier: Apache-2.0
"""What `edgellm export` runs a model for: calibration, and what quantisation cost."""
