# SPDX-License-Identifier: Apache-2.0
"""edgellm_ros: see, hear, answer and act with one model on one edge computer."""
