# SPDX-License-Identifier: Apache-2.0
"""The node `edgellm_follower`: action chunks in, velocity commands out."""
