# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoint's tokenizer: byte-level BPE with lower-casing.

The tokenizer is trained on the arena's own sentences, in each style. Because its pieces are bytes, a sentence
with unknown words is encoded without loss (apart from case); it only takes more tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edgellm_arena.episodes.situation import situations
from training.spec import SYSTEM_PROMPTS
from training.styles import STYLES

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


def corpus(seed: int, count: int) -> list[str]:
    """Return the sentences to train the tokenizer on.

    Sentences are commands and answers of `count` situations, answers in every style, role names and system
    prompts.
    """
    cases = list(itertools.islice(situations(seed, "train"), count))
    sentences = [*(s.command.text for s in cases), *(s.answer for s in cases)]
    for style in STYLES.values():
        found = itertools.islice(situations(seed, "train", style.manner), count // 4)
        sentences += [style.write(s.answer) for s in found]
    prompts = [*SYSTEM_PROMPTS, *(style.prompt for style in STYLES.values())]
    return [*sentences, *prompts * 50, *["system\n", "user\n", "assistant\n"] * count]


def train_tokenizer(sentences: Iterable[str], text_vocab_size: int, num_trajectory_tokens: int) -> Tokenizer:
    """Train BPE on `sentences` and append control tokens and trajectory tokens.

    The trajectory tokens `<|traj_0|>`, ... have consecutive ids.
    """
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    names = [*CONTROL_TOKENS, *(f"<|traj_{i}|>" for i in range(num_trajectory_tokens))]
    return byte_level_bpe(sentences, text_vocab_size, normalizer, names)


def byte_level_bpe(
    sentences: Iterable[str], size: int, normalizer: normalizers.Normalizer, control: Iterable[str]
) -> Tokenizer:
    """Train byte-level BPE of `size` tokens and append the control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return tokenizer
