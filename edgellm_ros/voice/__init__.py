# SPDX-License-Identifier: Apache-2.0
"""Speech out: text that is generated piece by piece becomes sound."""
