# SPDX-License-Identifier: Apache-2.0
"""The analytic driver, its search for a target, and how smooth a drive is."""
