# SPDX-License-Identifier: Apache-2.0
"""The node `edgellm_play`: chunks of sound in, a sound card or a WAV file out."""
