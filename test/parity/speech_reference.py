# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-ASR checkpoint of either layout, run by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
)

from fixtures.qwen3_asr_checkpoint import EXPERTS, ORIGINAL, TEMPLATES

SOUND = "<|audio_pad|>"
TOKENS = {"audio_token": SOUND, "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}


class SpeechReference:
    """A checkpoint in fp32 on the CPU."""

    def __init__(self, checkpoint: Path, layout: str) -> None:
        torch.set_num_threads(1)
        self.model = (
            (_load_original if layout == ORIGINAL else _load)(checkpoint).eval().requires_grad_(False)
        )
        self.model.generation_config.eos_token_id = json.loads(
            (checkpoint / "generation_config.json").read_text()
        )["eos_token_id"]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(checkpoint / "tokenizer.json"),
            pad_token="<|im_end|>",
            extra_special_tokens=TOKENS,
        )
        extractor = Qwen3ASRFeatureExtractor()
        self.processor = Qwen3ASRProcessor(extractor, tokenizer, chat_template=TEMPLATES[layout])

    def rows(self, sounds: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings of all sounds, [rows, H]."""
        return self.model.get_audio_features(
            *extracted(self.processor.feature_extractor, sounds), return_dict=True
        ).pooler_output.numpy()

    def inputs(self, context: str, sounds: Sequence[np.ndarray], language: str | None) -> dict[str, Any]:
        """Make the model's inputs of context, sounds, and a language that is forced.

        As in the original code, the beginning of the answer follows the rendered template.
        """
        beginning = f"language {language}<asr_text>" if language else ""
        features, mask = extracted(self.processor.feature_extractor, sounds)
        content = [{"type": "audio", "audio": sound} for sound in sounds]
        messages = [{"role": "system", "content": context}, {"role": "user", "content": content}]
        text = (
            self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            + beginning
        )
        counts = self.processor._get_audio_token_length(mask.sum(-1))
        first, *others = text.split(SOUND)
        text = first + "".join(SOUND * int(n) + part for n, part in zip(counts, others, strict=True))
        ids = self.processor.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "input_features": features, "input_features_mask": mask}


def extracted(
    extractor: Qwen3ASRFeatureExtractor, sounds: Sequence[np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-mel features [sounds, bins, frames] and their mask [sounds, frames].

    Each sound is processed alone: beside others, the longest decides how the shorter ones end.
    """
    made = [
        extractor(sound, sampling_rate=16000, padding=True, return_attention_mask=True) for sound in sounds
    ]
    frames = max(one["input_features"].shape[-1] for one in made)

    def padded(name: str) -> torch.Tensor:
        missing = [frames - one[name].shape[-1] for one in made]
        pairs = zip(made, missing, strict=True)
        return torch.stack([torch.nn.functional.pad(one[name][0], (0, count)) for one, count in pairs])

    return padded("input_features"), padded("attention_mask")


def _load(checkpoint: Path) -> Qwen3ASRForConditionalGeneration:
    model, info = Qwen3ASRForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def _load_original(checkpoint: Path) -> Qwen3ASRForConditionalGeneration:
    """Load a checkpoint of the original layout.

    Its tensors get the names that transformers' converter gives."""
    thinker = json.loads((checkpoint / "config.json").read_text())["thinker_config"]
    text = {key: value for key, value in thinker["text_config"].items() if key not in EXPERTS}
    rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    del text["rope_scaling"], text["model_type"]
    audio = {key: value for key, value in thinker["audio_config"].items() if key != "model_type"}
    config = Qwen3ASRConfig(
        audio_config=audio,
        text_config={**text, "rope_parameters": rope},
        audio_token_id=thinker["audio_token_id"],
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    model = Qwen3ASRForConditionalGeneration(config)
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        for old, new in (
            ("thinker.model.", "model.language_model."),
            ("thinker.lm_head.", "lm_head."),
            ("thinker.audio_tower.proj1.", "model.multi_modal_projector.linear_1."),
            ("thinker.audio_tower.proj2.", "model.multi_modal_projector.linear_2."),
            ("thinker.audio_tower.", "model.audio_tower."),
        ):
            if name.startswith(old):
                tensors[name.replace(old, new)] = tensor.float()
                break
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert not unexpected
    return model
