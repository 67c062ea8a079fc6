# SPDX-License-Identifier: Apache-2.0
"""The arena checkpoint's tokenizer: byte-level BPE, so that any prompt can be written, with lower-casing.

Trained on the arena's own sentences. Byte-level pieces mean that a sentence with words nobody trained on
still encodes without loss (apart from case), it only takes more tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PAD = "<|endoftext|>"
CONTROL_TOKENS = (
    PAD,
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|audio_start|>",
    "<|audio_pad|>",
    "<|audio_end|>",
    "<|video_pad|>",
    "<|traj_history_start|>",
    "<|traj_history|>",
    "<|traj_history_end|>",
    "<|traj_future_start|>",
)


def train_tokenizer(sentences: Iterable[str], text_vocab_size: int, num_trajectory_tokens: int) -> Tokenizer:
    """Train BPE on `sentences`, then append the control tokens and `<|traj_0|>` ... in consecutive ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text_vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    names = [*CONTROL_TOKENS, *(f"<|traj_{i}|>" for i in range(num_trajectory_tokens))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer
