# SPDX-License-Identifier: Apache-2.0
"""Parts of the pipeline's stages: prompts, and what follows a failure."""
