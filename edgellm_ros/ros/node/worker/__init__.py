# SPDX-License-Identifier: Apache-2.0
"""The planning thread, its jobs, and the order in which they run."""
