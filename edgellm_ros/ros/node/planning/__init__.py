# SPDX-License-Identifier: Apache-2.0
"""From a command or a goal to a plan: jobs, inputs, the planner, chunking."""
