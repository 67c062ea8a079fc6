# SPDX-License-Identifier: Apache-2.0
"""The checkpoint run by transformers' own classes.

The tokenizer, chat template, processors, encoders and language model are those of transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids


@dataclass(frozen=True)
class Prompt:
    """Inputs of one request as transformers makes them.

    pixel_values and grid are None without an image, input_features and feature_mask without a sound.
    """

    input_ids: Tensor  # [1, S]
    pixel_values: Tensor | None  # [P, values per patch]
    grid: Tensor | None  # [images, 3] time, rows, columns of patches
    input_features: Tensor | None = None  # [sounds, mel bins, frames]
    feature_mask: Tensor | None = None  # [sounds, frames], 1 where there is sound

    @property
    def frames(self) -> Tensor | None:
        """Frames of each sound."""
        return None if self.feature_mask is None else self.feature_mask.sum(-1)


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its tokens, their logits, and the KV cache.

    logits [tokens, V]: what each token is taken from. cache: of all that ran, per layer keys and values [Hkv,
    length, D]; length is that of the prompt plus all tokens (the last one is run too). delta: position of a
    token = its index in the sequence + delta.
    """

    token_ids: list[int]
    logits: Tensor
    cache: list[tuple[Tensor, Tensor]]
    delta: int


class ThinkerReference:
    """A checkpoint in fp32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        logging.getLogger("transformers").setLevel(
            logging.ERROR
        )  # the config has an audio tower, the weights need not
        model = Qwen3OmniMoeThinkerForConditionalGeneration
        self.model = model.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.processor = AutoImageProcessor.from_pretrained(checkpoint)
        self.hears = "feature_extractor_type" in json.loads(
            (checkpoint / "preprocessor_config.json").read_text()
        )
        self.extractor = AutoFeatureExtractor.from_pretrained(checkpoint) if self.hears else None
        generation = json.loads((checkpoint / "generation_config.json").read_text())
        self.stop_ids = list(generation["eos_token_id"])
        expert = checkpoint / "action_expert" / "config.json"
        self.expert_config = json.loads(expert.read_text()) if expert.is_file() else None

    def prompt(
        self,
        text: str,
        system: str = "",
        image: np.ndarray | None = None,
        history=None,
        sounds: Sequence[np.ndarray] = (),
    ) -> Prompt:
        """Make a prompt with chat template and tokenizer.

        Each image row and audio row has one placeholder, and the history's tokens are in place of the
        history's own placeholder. sounds: float32 at 16 kHz.
        """
        items: list[dict] = [{"type": "image"}] if image is not None else []
        if self.expert_config is not None:
            items.append({"type": "trajectory_history"})
        items += [{"type": "audio"} for _ in sounds]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": [*items, {"type": "text", "text": text}]})
        return self.conversation(messages, [] if image is None else [image], history, sounds)

    def conversation(
        self,
        messages: list[dict],
        images: Sequence[np.ndarray],
        history=None,
        sounds: Sequence[np.ndarray] = (),
    ) -> Prompt:
        """Make a prompt of messages in transformers' format.

        Images and sounds are in the order of the messages.
        """
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        pixel_values = grid = features = mask = None
        if sounds:
            features, mask = self.features(sounds)
            window, token = self.model.config.audio_config.n_window, self.model.config.audio_token_id
            counts = omni._get_feat_extract_output_lengths(mask.sum(-1), window).tolist()
            ids = _replace(ids, token, *[[token] * count for count in counts])
        if images:
            processed = self.processor(images=list(images), return_tensors="pt")
            pixel_values, grid = processed["pixel_values"], processed["image_grid_thw"]
            token, block = self.model.config.image_token_id, self.processor.merge_size**2
            ids = _replace(ids, token, *[[token] * (int(one.prod()) // block) for one in grid])
        if self.expert_config is not None:
            ids = _replace(ids, self.expert_config["history_token_id"], self.history_ids(history))
        return Prompt(torch.tensor([ids]), pixel_values, grid, features, mask)

    def features(self, sounds: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return the log-mel features of each sound on its own, and their mask.

        Features are [sounds, mel bins, frames]. The extractor, given several at once, would let the longest
        decide how the others end.
        """
        made = [
            self.extractor(sound, sampling_rate=16000, padding=True, truncation=False, return_tensors="pt")
            for sound in sounds
        ]
        features = [one["input_features"][0].T for one in made]
        masks = [torch.ones(len(one), dtype=torch.long) for one in features]
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(features, batch_first=True).transpose(1, 2), pad(masks, batch_first=True)

    def history_ids(self, history=None) -> list[int]:
        """Tokens of past positions [N, 2] in metres, oldest first; None is standing still."""
        config = self.expert_config["trajectory_history"]
        points = np.zeros((config["num_points"], 2)) if history is None else np.asarray(history, np.float64)
        values = np.concatenate([points[:1], np.diff(points, axis=0)])
        low, high = np.asarray(config["low"]), np.asarray(config["high"])
        bins = np.round((values - low) / (high - low) * (config["num_tokens"] - 1)).astype(int)
        return [config["first_token_id"] + int(b) for b in bins.clip(0, config["num_tokens"] - 1).reshape(-1)]

    def vision(self, prompt: Prompt) -> list[Tensor]:
        """Image rows, then the deepstack rows of each level, [R, H] each."""
        out = self.model.model.get_image_features(prompt.pixel_values, prompt.grid, return_dict=True)
        return [torch.cat(part) for part in (out.pooler_output, *out.deepstack_features)]

    def audio(self, prompt: Prompt) -> Tensor:
        """Rows of all sounds, [A, H]."""
        return self.model.model.get_audio_features(
            prompt.input_features, prompt.feature_mask, return_dict=True
        ).last_hidden_state

    def audio_inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """What the audio graph takes, from the functions that the model itself uses."""
        config = self.model.config.audio_config
        features = prompt.input_features.transpose(1, 2)[prompt.feature_mask.bool()].T
        chunks, lengths = omni.chunk_and_pad_features(features, prompt.frames, config.n_window)
        index = omni.get_valid_indices(lengths, config.n_window)
        bounds = omni.get_audio_cu_seqlens(lengths, prompt.frames, config.n_window_infer, config.n_window)
        windows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        return {
            "input_features": chunks,
            "token_index": index,
            "position_index": index % -(-chunks.shape[2] // 8),
            "attention_mask": (windows[:, None] == windows)[None, None],
        }

    def vision_inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return what the vision graph takes besides the pixels.

        The inputs are made by the functions that the model itself uses.
        """
        tower = self.model.model.visual
        merge = tower.spatial_merge_size
        positions = get_vision_position_ids(prompt.grid, merge)
        cos, sin = tower.rotary_pos_emb(prompt.pixel_values, positions)
        index, weight = get_vision_interpolation_indices_and_weights(
            prompt.grid, tower.num_grid_per_side, "bilinear", align_corners=True, spatial_merge_size=merge
        )
        half = cos.shape[-1] // 2
        return {
            "rope_cos": cos[:, :half],
            "rope_sin": sin[:, :half],
            "pos_embed_index": index.T,
            "pos_embed_weight": weight.T,
        }

    def rope_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [3, B, S] -> cos, sin [B, S, D/2]."""
        cos, sin = self.model.model.language_model.rotary_emb(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    def positions(self, prompt: Prompt) -> tuple[Tensor, int]:
        """mRoPE positions [3, 1, S] of the prompt, and the delta of what follows."""
        mask = torch.ones_like(prompt.input_ids)
        positions, delta = self.model.get_rope_index(
            prompt.input_ids, prompt.grid, attention_mask=mask, audio_seqlens=prompt.frames
        )
        return positions, int(delta)

    def prefill_logits(self, prompt: Prompt) -> Tensor:
        """[S, V]."""
        return self.model(**self._inputs(prompt), use_cache=False).logits[0]

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Greedy decoding by `generate`."""
        out = self.model.generate(
            **self._inputs(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.stop_ids,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        length = prompt.input_ids.shape[1]
        tokens = out.sequences[0, length:].tolist()
        delta = int(self.model.model.rope_deltas)
        # `generate` stops without running its last token; a trajectory is made after the one that starts it
        position = torch.full((3, 1, 1), out.sequences.shape[1] - 1 + delta)
        self.model(
            input_ids=out.sequences[:, -1:], past_key_values=out.past_key_values, position_ids=position
        )
        cache = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
        return Answer(tokens, torch.cat(out.logits), cache, delta)

    def _inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        inputs = {"input_ids": prompt.input_ids, "attention_mask": torch.ones_like(prompt.input_ids)}
        if prompt.pixel_values is not None:
            inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.grid}
        if prompt.input_features is not None:
            inputs |= {
                "input_features": prompt.input_features,
                "feature_attention_mask": prompt.feature_mask,
            }
        return inputs


def _replace(ids: list[int], placeholder: int, *replacements: list[int]) -> list[int]:
    """The i-th placeholder becomes the i-th replacement."""
    waiting = list(replacements)
    replaced: list[int] = []
    for token in ids:
        replaced += waiting.pop(0) if token == placeholder else [token]
    assert not waiting
    return replaced
