# SPDX-License-Identifier: Apache-2.0
"""Episodes in closed loop: robot and controller, drivers, records, pictures."""
