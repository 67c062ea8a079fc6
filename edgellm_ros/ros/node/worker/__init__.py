# SPDX-License-Identifier: Apache-2.0
"""The planning threads, their jobs, and the order in which these run."""
