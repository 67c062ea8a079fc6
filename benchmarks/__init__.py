# SPDX-License-Identifier: Apache-2.0
"""What the package costs and how well the robot drives. `python -m benchmarks` runs all; each file also runs
alone.
"""
