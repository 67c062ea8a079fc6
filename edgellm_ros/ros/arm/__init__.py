# SPDX-License-Identifier: Apache-2.0
"""The node `edgellm_arm`: chunks of a policy in, trajectories of an arm out."""
