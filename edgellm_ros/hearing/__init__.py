# SPDX-License-Identifier: Apache-2.0
"""Speech to commands: an engine for speech beside the one that answers."""
