# SPDX-License-Identifier: Apache-2.0
"""Compare the batched forward pass of training with that of transformers.

Examples
--------
    python -m training.check CHECKPOINT
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration, WhisperFeatureExtractor

from training.hearing import LogMel, token_count
from training.thinker import IMAGE_TOKENS, Sequences, Sounds, ThinkerForward, patchify

SECONDS = (3.21, 1.5)


@torch.no_grad()
def main() -> None:
    """Print the largest differences on random images, sounds and ids.

    Compared are features, embeddings, logits and cached keys.
    """
    load = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained
    thinker = load(sys.argv[1], dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(sys.argv[1])
    torch.manual_seed(0)
    config, batch, length = thinker.config, len(SECONDS), 180
    image, sound = 5, 100
    images = torch.randint(0, 256, (batch, 224, 320, 3), dtype=torch.uint8)
    count = torch.tensor([round(seconds * 16000) for seconds in SECONDS])
    samples = (torch.randn(batch, 80000) * 2000).to(torch.int16)
    samples[torch.arange(80000) >= count[:, None]] = 0
    tokens = token_count(count)
    ids = torch.randint(0, 300, (batch, length))
    ids[:, image - 1], ids[:, image + IMAGE_TOKENS] = config.vision_start_token_id, config.vision_end_token_id
    ids[:, image : image + IMAGE_TOKENS] = config.image_token_id
    for row, heard in zip(ids, tokens.tolist(), strict=True):
        row[sound - 1], row[sound + heard] = config.audio_start_token_id, config.audio_end_token_id
        row[sound : sound + heard] = config.audio_token_id
    # One at a time: in a batch the extractor would pad a sound before it reflects its end.
    frames = count // 160
    theirs_features = torch.zeros(batch, 128, int(frames.max()))
    for row, clip, n in zip(theirs_features, samples, count.tolist(), strict=True):
        heard = clip[:n].numpy().astype(np.float32) / 32768
        made = extractor(heard, sampling_rate=16000, padding=True, truncation=False, return_tensors="pt")
        row[:, : n // 160] = made["input_features"][0, :, : n // 160]
    theirs = thinker(
        input_ids=ids,
        pixel_values=patchify(images).flatten(0, 1),
        image_grid_thw=torch.tensor([[1, 14, 20]] * batch),
        input_features=theirs_features,
        feature_attention_mask=(torch.arange(theirs_features.shape[2]) < frames[:, None]).long(),
        attention_mask=torch.ones_like(ids),
        use_cache=True,
    )
    ours = ThinkerForward(thinker)
    features = LogMel()(samples, count)
    sounds = Sounds(ours.audio(features, tokens), torch.full((batch,), sound), tokens)
    hidden, cache = ours(Sequences(ids, torch.full((batch,), image), *ours.vision(images), sounds))

    differences = {
        "features": (features[..., : theirs_features.shape[2]] - theirs_features).abs().max().item()
    }
    differences["logits"] = (thinker.lm_head(hidden) - theirs.logits).abs().max().item()
    pairs = zip(cache, theirs.past_key_values.layers, strict=True)
    differences["cached keys"] = max((keys - layer.keys).abs().max().item() for (keys, _), layer in pairs)
    print("largest differences:", ", ".join(f"{name} {value:.2e}" for name, value in differences.items()))
    if max(differences.values()) > 1e-3:
        raise SystemExit(
            "the forward pass of training differs from transformers: expected differences up to 1e-3"
        )


if __name__ == "__main__":
    main()
