# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files say beside the weights: positions, tokens, processors."""
