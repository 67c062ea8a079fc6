# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-ASR: sizes, losses, and transcripts of a batch of sounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

from training.asr.tokens import ANSWER_WINDOW
from training.hearing import AudioForward, WordHead, scale_convolutions
from training.policy import Batch, answer_losses
from training.thinker import Sounds, with_sounds
from training.tokenizer import PAD


@dataclass(frozen=True)
class Sizes:
    """Sizes of encoder and text model."""

    encoder: int = 256  # multiple of 64
    encoder_layers: int = 6
    channels: int = 48  # of the convolutions
    text: int = 320
    text_layers: int = 4


def speech_config(tokenizer: Tokenizer, sizes: Sizes = Sizes()) -> Qwen3ASRConfig:
    """Return the configuration, in the layout of transformers."""
    token = tokenizer.token_to_id
    return Qwen3ASRConfig(
        architectures=["Qwen3ASRForConditionalGeneration"],
        audio_config={
            "d_model": sizes.encoder,
            "encoder_layers": sizes.encoder_layers,
            "encoder_attention_heads": sizes.encoder // 64,
            "encoder_ffn_dim": 4 * sizes.encoder,
            "downsample_hidden_size": sizes.channels,
            "output_dim": sizes.text,
            "num_mel_bins": 128,
        },
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": sizes.text,
            "intermediate_size": sizes.text * 5 // 2,
            "num_hidden_layers": sizes.text_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
        audio_token_id=token("<|audio_pad|>"),
        timestamp_token_id=token(PAD),  # only the forced aligner has times
        pad_token_id=token(PAD),
        eos_token_id=[token(PAD), token("<|im_end|>")],
        tie_word_embeddings=True,
    )


def new_model(config: Qwen3ASRConfig) -> Qwen3ASRForConditionalGeneration:
    """Make a model with random weights."""
    model = Qwen3ASRForConditionalGeneration(config)
    scale_convolutions(model.model.audio_tower)
    return model


class Recogniser(nn.Module):
    """Batched forward pass of a model, and a head for the CTC loss.

    A checkpoint does not have this head.
    """

    def __init__(self, model: Qwen3ASRForConditionalGeneration):
        super().__init__()
        self.model = model
        self.audio = AudioForward(model.model.audio_tower, model.model.multi_modal_projector)
        self.words = WordHead(model.config.audio_config.output_dim, model.config.pad_token_id)

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of encoder and word head, and those of the text model."""
        hearing = [*self.audio.parameters(), *self.words.parameters()]
        known = {id(parameter) for parameter in hearing}
        return hearing, [each for each in self.parameters() if id(each) not in known]

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the text model's inputs and the embeddings of the sounds.

        Their shapes are [B, L, H] and [B, T, H]. batch: ids [B, L], features [B, 128, F],
        audio_start and audio_tokens [B].
        """
        heard = self.audio(batch["features"], batch["audio_tokens"])
        h = self.model.model.language_model.embed_tokens(batch["ids"])
        return with_sounds(h, Sounds(heard, batch["audio_start"], batch["audio_tokens"])), heard

    def states(self, h: Tensor) -> Tensor:
        """Compute the text model's last states [B, L, H] from its inputs.

        Sequences begin at the first row and are causal, so what follows them has no influence.
        """
        return self.model.model.language_model(inputs_embeds=h, use_cache=False).last_hidden_state

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy per answer token, and scores for the CTC loss.

        The scores are the word head's log-probabilities [T, B, V + 1].
        """
        h, heard = self.embed(batch)
        loss = answer_losses(self.model.lm_head, batch, self.states(h), ANSWER_WINDOW)
        tokens = (batch["length"] - batch["prompt_length"]).sum()
        return loss.sum() / tokens, self.words(heard)

    @torch.no_grad()
    def answers(self, batch: Batch, stop: int) -> tuple[Tensor, Tensor]:
        """Decode greedily; `batch` has prompts without answers.

        Returns ids [B, ANSWER_WINDOW], `stop` from an answer's end on, and their log-probabilities.
        """
        h, _ = self.embed(batch)
        row, length = torch.arange(len(h), device=h.device), batch["length"].long()
        ids = torch.full((len(h), ANSWER_WINDOW), stop, device=h.device)
        scores = torch.zeros(ids.shape, device=h.device)
        ended = torch.zeros(len(h), dtype=torch.bool, device=h.device)
        for step in range(ANSWER_WINDOW):
            last = self.states(h)[row, length + step - 1]
            best, chosen = self.model.lm_head(last).float().log_softmax(-1).max(-1)
            ids[:, step], scores[:, step] = chosen.masked_fill(ended, stop), best
            ended |= chosen == stop
            if ended.all():
                break
            place = (length + step).clamp(max=h.shape[1] - 1)
            h[row, place] = self.model.model.language_model.embed_tokens(chosen).to(h.dtype)
        return ids, scores
