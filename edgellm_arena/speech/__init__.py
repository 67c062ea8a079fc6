# SPDX-License-Identifier: Apache-2.0
"""People who say commands, and the rooms in which a microphone hears them."""
