# SPDX-License-Identifier: Apache-2.0
"""Record references by transformers: `python test/data/record_references.py`.

Writes transformers_references.json beside this file. Needs torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import soxr
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerModel,
    _get_feat_extract_output_lengths,
)

sys.path.append(str(Path(__file__).parents[1]))

from fixtures.reference_inputs import (
    BANDS,
    FRAMES,
    IMAGE_TOKEN,
    VISION_START,
    make_image,
    make_sound,
    prompt_ids,
)
from fixtures.tiny_checkpoint import write_tiny_checkpoint

REFERENCES = Path(__file__).with_name("transformers_references.json")

IMAGE_SIZES = [
    (224, 320),
    (240, 320),
    (480, 640),
    (50, 33),
    (17, 400),
    (224, 319),
    (721, 1283),
]  # height, width
IMAGE_BOUNDS = [(71680, 71680), (3136, 100352)]  # shortest_edge, longest_edge
PROMPTS = [  # lengths of text, with image grids (rows, columns of tokens) between them
    ([5], []),
    ([3, 4], [(7, 10)]),
    ([1, 0, 6], [(2, 3), (5, 1)]),
    ([4, 1, 2], [(1, 1), (3, 8)]),
]


SOUNDS = [(0.02, 16000, 0.5), (1.27, 44100, 3.0), (2.5, 8000, 1e-3)]  # seconds, sample rate, loudness
HEARD = [0.4, 3.14]  # seconds of the sounds for the tiny checkpoint


def extract(samples: np.ndarray) -> np.ndarray:
    """Return log-mel features [128, frames] of 16 kHz samples.

    The features are those of Qwen3-Omni's extractor.
    """
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    return extractor(samples, sampling_rate=16000, padding=True, truncation=False)["input_features"][0]


def sound_reference(seconds: float, sample_rate: int, loudness: float) -> dict:
    samples = soxr.resample(make_sound(seconds, sample_rate, loudness), sample_rate, 16000)
    features = extract(samples)
    part = features[BANDS, FRAMES].astype(float).round(6).tolist()
    return {"sound": [seconds, sample_rate, loudness], "frames": features.shape[1], "features": part}


def hearing_references() -> list[dict]:
    """Return the first and last audio row of the tiny checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_tiny_checkpoint(Path(directory), action_expert=False)
        model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    references = []
    for seconds in HEARD:
        features = torch.from_numpy(extract(make_sound(seconds, 16000)))
        lengths = torch.tensor([features.shape[1]])
        with torch.no_grad():
            rows = model.model.audio_tower(features, feature_lens=lengths).last_hidden_state
        ends = rows[[0, -1]].double().numpy().round(6).tolist()
        references.append({"seconds": seconds, "tokens": len(rows), "rows": ends})
    return references


def image_reference(height: int, width: int, bounds: tuple[int, int]) -> dict:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": bounds[0], "longest_edge": bounds[1]},
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.25, 0.2],
    )
    result = processor(make_image(height, width), return_tensors="np")
    return {
        "size": [height, width],
        "bounds": list(bounds),
        "grid": result["image_grid_thw"][0, 1:].tolist(),
        "sha256": hashlib.sha256(result["pixel_values"].astype("<f4").tobytes()).hexdigest(),
    }


def rope_reference(texts: list[int], grids: list[tuple[int, int]]) -> dict:
    class Model:
        """The attributes of a thinker that get_rope_index reads."""

        spatial_merge_size = 2
        config = Qwen3OmniMoeThinkerConfig(image_token_id=IMAGE_TOKEN, vision_start_token_id=VISION_START)
        get_llm_pos_ids_for_vision = Qwen3OmniMoeThinkerModel.get_llm_pos_ids_for_vision

    ids = torch.tensor([prompt_ids(texts, grids)])
    patches = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]) if grids else None
    mask = torch.ones_like(ids)
    positions, delta = Qwen3OmniMoeThinkerModel.get_rope_index(Model(), ids, patches, attention_mask=mask)
    return {
        "texts": texts,
        "grids": [list(grid) for grid in grids],
        "positions": positions[:, 0].long().tolist(),
        "delta": int(delta[0, 0]),
    }


def main() -> None:
    references = {
        "transformers": transformers.__version__,
        "images": [image_reference(*size, bounds) for size in IMAGE_SIZES for bounds in IMAGE_BOUNDS],
        "rope": [rope_reference(*prompt) for prompt in PROMPTS],
        "sounds": [sound_reference(*sound) for sound in SOUNDS],
        "audio_tokens": _get_feat_extract_output_lengths(torch.arange(1, 321)).tolist(),
        "hearing": hearing_references(),
    }
    REFERENCES.write_text(json.dumps(references) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
