# SPDX-License-Identifier: Apache-2.0
"""Sound to the audio encoder's rows, and speech in a stream of sound."""
