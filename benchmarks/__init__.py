# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the package's cost and of the robot's driving.

`python -m benchmarks` runs the default set; each file also runs alone.
"""
