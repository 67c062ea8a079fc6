# SPDX-License-Identifier: Apache-2.0
"""Log-mel features and audio encoder for training, batched over padded clips.

Both repeat computations of transformers (`WhisperFeatureExtractor`, `Qwen3OmniMoeAudioEncoder`), which
process one clip at a time, for clips of different lengths in one batch. `python -m training.check` compares
them.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from training.transfer import to_device

SAMPLE_RATE = 16000
WINDOW, HOP, MEL_BINS = 400, 160, 128
CHUNK_FRAMES, CHUNK_TOKENS = 100, 13


def token_count(samples: Tensor) -> Tensor:
    """Compute the number of audio tokens of clips with this number of samples.

    100 frames (1 s) become 13 tokens; the convolutions reduce the rest.
    """
    frames = samples // HOP
    rest = frames % CHUNK_FRAMES
    for _ in range(3):
        rest = (rest + 1) // 2
    return frames // CHUNK_FRAMES * CHUNK_TOKENS + rest


def vary(samples: Tensor, count: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Augment recordings by shorter pauses and other speeds.

    A recording starts up to 0.1 s later and ends up to 0.2 s earlier; half of them play up to 7% faster or
    slower. samples: [B, N] int16; count: [B] on the host; returns the same. Training uses each sound many
    times, and must not learn how the sound is cut into chunks and tokens.
    """
    batch, most = samples.shape
    start = rng.integers(0, SAMPLE_RATE // 10, batch)
    left = count.numpy() - start - rng.integers(0, SAMPLE_RATE // 5, batch)
    speed = np.where(rng.random(batch) < 0.5, 1.0, rng.uniform(0.93, 1.07, batch))
    counts = np.minimum(left / speed, most).astype(np.int64)
    speed = np.maximum(speed, left / most)
    column = lambda x: to_device(x, samples.device).float()[:, None]  # noqa: E731
    index = torch.arange(most, device=samples.device)
    place = column(start) + index * column(speed)
    before = place.floor().long().clamp(0, most - 2)
    x = torch.lerp(
        samples.gather(1, before).float(), samples.gather(1, before + 1).float(), (place - before).clamp(0, 1)
    )
    inside = index < column(counts)
    return torch.where(inside, x.round(), 0).to(torch.int16), torch.from_numpy(counts)


def scale_convolutions(tower: nn.Module) -> None:
    """Give an encoder's convolutions random weights of a useful scale.

    transformers initialises every weight with a standard deviation of 0.02. The convolutions' output for a
    sound would then be 500 times smaller than the position embeddings that are added to it. After this, both
    have the same scale.
    """
    for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.kaiming_normal_(tower.conv_out.weight, nonlinearity="linear")


class LogMel(nn.Module):
    """Whisper's log-mel features of a batch of clips."""

    def __init__(self):
        super().__init__()
        filters = mel_filter_bank(
            num_frequency_bins=1 + WINDOW // 2,
            num_mel_filters=MEL_BINS,
            min_frequency=0.0,
            max_frequency=SAMPLE_RATE / 2,
            sampling_rate=SAMPLE_RATE,
            norm="slaney",
            mel_scale="slaney",
        )
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    @torch.no_grad()
    def forward(self, samples: Tensor, count: Tensor) -> Tensor:
        """Compute features [B, 128, N / 160] float32 of int16 samples [B, N].

        count [B] samples are valid; features after count // 160 frames are zero. Each clip is reflected at
        its own end, and its floor is 8 below its own loudest frame.
        """
        x = samples.float() / 32768.0
        last = count[:, None] - 1
        index = (torch.arange(-WINDOW // 2, x.shape[1] + WINDOW // 2, device=x.device)).abs()[None]
        index = torch.where(index > last, 2 * last - index, index).clamp(min=0)
        spectrum = torch.stft(
            x.gather(1, index), WINDOW, HOP, window=self.window, center=False, return_complex=True
        )
        power = spectrum[..., : x.shape[1] // HOP].abs().square()
        log = (self.filters.T @ power).clamp(min=1e-10).log10()
        frames = torch.arange(log.shape[2], device=x.device)
        valid = (frames < (count // HOP)[:, None])[:, None]
        loudest = log.masked_fill(~valid, -torch.inf).amax((1, 2), keepdim=True)
        return torch.where(valid, (torch.maximum(log, loudest - 8.0) + 4.0) / 4.0, 0.0)


class AudioForward(nn.Module):
    """Batched forward pass of transformers' audio encoder, for clips of at most 8 s.

    tower: with its two projections inside, as Qwen3-Omni's, or the encoder of Qwen3-ASR, whose projector
    comes extra. 8 s is the encoder's attention window. A clip of less than one chunk is padded to one chunk,
    as Qwen3-ASR does, and Qwen3-Omni if the same call has a longer clip; alone, the last token of such a clip
    differs a little in Qwen3-Omni.
    """

    def __init__(self, tower: nn.Module, projector: nn.Module | None = None):
        super().__init__()
        self.tower, self.projector = tower, projector
        table = tower.positional_embedding.positional_embedding
        self.register_buffer("positions", table[:CHUNK_TOKENS].clone(), persistent=False)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Encode features [B, 128, 100 n] to embeddings [B, 13 n, H].

        tokens: valid tokens [B]; rows after them are meaningless.
        """
        tower = self.tower
        batch, bins, frames = features.shape
        chunks = frames // CHUNK_FRAMES
        x = features.view(batch, bins, chunks, CHUNK_FRAMES).transpose(1, 2)
        x = x.reshape(batch * chunks, 1, bins, CHUNK_FRAMES)
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            x = F.gelu(conv(x))
        x = tower.conv_out(x.permute(0, 3, 1, 2).flatten(2)) + self.positions
        x = x.view(batch, chunks * CHUNK_TOKENS, -1)
        seen = (torch.arange(x.shape[1], device=x.device) < tokens[:, None])[:, None, None]
        for layer in tower.layers:
            x = x + self._attend(layer.self_attn, layer.self_attn_layer_norm(x), seen)
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        x = tower.ln_post(x)
        return tower.proj2(tower.act(tower.proj1(x))) if self.projector is None else self.projector(x)

    @staticmethod
    def _attend(attention: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
        heads = lambda y: y.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(attention.q_proj(x)), heads(attention.k_proj(x)), heads(attention.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(-1, 1, x.shape[1], -1))
        return attention.out_proj(y.transpose(1, 2).flatten(2))


class WordHead(nn.Module):
    """Predicts the word of each audio token, for the CTC loss (Graves et al. 2006).

    Only training needs it. Word 0 is the blank.
    """

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, vocabulary + 1)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute log-probabilities [T, B, vocabulary + 1] of embeddings [B, T, H]."""
        return self.out(self.norm(embeddings)).float().log_softmax(-1).transpose(0, 1)


def ctc_loss(log_probabilities: Tensor, tokens: Tensor, words: Tensor, word_counts: Tensor) -> Tensor:
    """Compute the CTC loss per word.

    words: token ids [B, W] from 0; log_probabilities: [T, B, V + 1]. The lengths tokens and word_counts [B]
    are on the CPU, which saves a wait for the GPU. A sound without words counts as one word.
    """
    loss = F.ctc_loss(log_probabilities, words + 1, tokens, word_counts, zero_infinity=True, reduction="none")
    return (loss / word_counts.clamp(min=1).to(loss.device)).mean()


def greedy_words(log_probabilities: Tensor, tokens: Tensor) -> list[list[int]]:
    """Return the most likely words of each clip: repeats merged, blanks dropped."""
    best = log_probabilities.argmax(-1).T.cpu()
    result = []
    for row, count in zip(best, tokens.tolist(), strict=True):
        merged = torch.unique_consecutive(row[:count])
        result.append([word - 1 for word in merged.tolist() if word > 0])
    return result
