# SPDX-License-Identifier: Apache-2.0
"""Tokens of a speech-to-text model: its tokenizer, its prompts and its answers.

prompt   <|im_start|>system\\nCONTEXT<|im_end|>\\n<|im_start|>user\\n<|audio_start|>SOUND<|audio_end|>
         <|im_end|>\\n<|im_start|>assistant\\n
answer   language English<asr_text>SENTENCE<|im_end|>
answer   language None<asr_text><|im_end|>          without speech
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, normalizers

from edgellm_arena.words.language import sample_command
from edgellm_arena.world.scene import COLORS, SHAPES
from edgellm_ros.engine_directory.tokenizer_file import TRANSCRIPT_MARK
from training.data import MEANINGS
from training.speech import MAX_WORDS, heard_text
from training.tokenizer import PAD, byte_level_bpe

TEXT_VOCABULARY = 700
CONTROL_TOKENS = (PAD, "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
LENGTH = 160  # tokens of a sequence: 65 of sound, 24 words, a context, the rest of the template
ANSWER_WINDOW = MAX_WORDS + 8
CONTEXTS = 256  # system prompts that training has


def sentences(seed: int, count: int) -> list[str]:
    """Return the texts to train the tokenizer on.

    These are commands as they are heard, contexts, and the words of the template.
    """
    rng = np.random.default_rng([seed, 5])
    meanings = [MEANINGS[int(index)] for index in rng.integers(len(MEANINGS), size=count)]
    said = [heard_text(sample_command(rng, *meaning).text) for meaning in meanings]
    fixed = ("system\n", "user\n", "assistant\n", "language English", "language None")
    return [*said, *contexts(seed, count // 4), *fixed * count]


def contexts(seed: int, count: int) -> list[str]:
    """Return system prompts: lists of things that may be named."""
    rng = np.random.default_rng([seed, 6])
    made = []
    for _ in range(count):
        words = [f"{rng.choice(COLORS)} {rng.choice(SHAPES)}" for _ in range(int(rng.integers(1, 5)))]
        made.append(", ".join(words).capitalize() if rng.random() < 0.3 else ", ".join(words))
    return made


def train_tokenizer(texts: Sequence[str], size: int = TEXT_VOCABULARY) -> Tokenizer:
    """Train byte-level BPE that keeps case.

    Qwen3-ASR's control tokens follow, and the mark before a transcript, which is not special: answers show
    it.
    """
    tokenizer = byte_level_bpe(texts, size, normalizers.NFC(), CONTROL_TOKENS)
    tokenizer.add_tokens([AddedToken(TRANSCRIPT_MARK, special=False, normalized=False)])
    return tokenizer


class Sequences:
    """Writes the token sequences of a batch, as the published chat template does."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.pad, self.end = (tokenizer.token_to_id(name) for name in (PAD, "<|im_end|>"))
        self.mark = tokenizer.token_to_id(TRANSCRIPT_MARK)
        self._sound = tokenizer.token_to_id("<|audio_pad|>")
        self._after = self.text("<|audio_end|><|im_end|>\n<|im_start|>assistant\n")
        self._speech = self.text(f"language English{TRANSCRIPT_MARK}")
        self._no_speech = self.text(f"language None{TRANSCRIPT_MARK}")

    def text(self, text: str) -> list[int]:
        """Return the ids of a text with control tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def before(self, context: str = "") -> list[int]:
        """Return the ids of a prompt up to its sound."""
        return self.text(f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>")

    def answer(self, words: Sequence[int]) -> list[int]:
        """Return the answer whose sentence has these ids; none = there is no speech."""
        return [*(self._speech if len(words) else self._no_speech), *words, self.end]

    def write(
        self,
        befores: Sequence[Sequence[int]],
        tokens: Sequence[int],
        answers: Sequence[Sequence[int]],
    ) -> dict[str, np.ndarray]:
        """Write a batch.

        befores: ids of each prompt up to its sound; tokens: of each sound. Returns ids [B, LENGTH] padded
        with PAD, and as [B] the numbers audio_start, prompt_length and length. ValueError for a sequence of
        more than LENGTH tokens.
        """
        size = len(tokens)
        batch = {name: np.zeros(size, np.int64) for name in ("audio_start", "prompt_length", "length")}
        ids = np.full((size, LENGTH), self.pad, np.int64)
        for i, (before, count, answer) in enumerate(zip(befores, tokens, answers, strict=True)):
            prompt = [*before, *[self._sound] * count, *self._after]
            length = len(prompt) + len(answer)
            if length > LENGTH:
                raise ValueError(f"a sequence must have at most {LENGTH} tokens, got {length}")
            ids[i, :length] = [*prompt, *answer]
            batch["audio_start"][i], batch["prompt_length"][i] = len(before), len(prompt)
            batch["length"][i] = length
        return {"ids": ids, **batch}
