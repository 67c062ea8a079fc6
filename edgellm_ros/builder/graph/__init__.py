# SPDX-License-Identifier: Apache-2.0
"""Graph builders, and the parts that the graphs of all models share."""
