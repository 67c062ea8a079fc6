# SPDX-License-Identifier: Apache-2.0
"""Compare the batched training forward with transformers' own: `python -m training.check CHECKPOINT`."""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from training.data import IMAGE_TOKENS
from training.thinker import Sequences, ThinkerForward, patchify


@torch.no_grad()
def main() -> None:
    """Print the largest differences of logits and cached keys, on random images and ids."""
    load = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained
    thinker = load(sys.argv[1], dtype=torch.float32).eval()
    torch.manual_seed(0)
    config, batch, length, start = thinker.config, 2, 120, 5
    images = torch.randint(0, 256, (batch, 224, 320, 3), dtype=torch.uint8)
    ids = torch.randint(0, 300, (batch, length))
    ids[:, start - 1], ids[:, start + IMAGE_TOKENS] = config.vision_start_token_id, config.vision_end_token_id
    ids[:, start : start + IMAGE_TOKENS] = config.image_token_id
    grid, mask = torch.tensor([[1, 14, 20]] * batch), torch.ones_like(ids)
    positions, _ = thinker.model.get_rope_index(ids, image_grid_thw=grid, attention_mask=mask)
    theirs = thinker(
        input_ids=ids,
        pixel_values=patchify(images).flatten(0, 1),
        image_grid_thw=grid,
        attention_mask=mask,
        use_cache=True,
    )
    hidden, cache = ThinkerForward(thinker)(images, Sequences(ids, positions, torch.full((batch,), start)))
    logits = (thinker.lm_head(hidden) - theirs.logits).abs().max().item()
    pairs = zip(cache, theirs.past_key_values.layers, strict=True)
    keys = max((ours - layer.keys).abs().max().item() for (ours, _), layer in pairs)
    print(f"largest difference: logits {logits:.2e}, cached keys {keys:.2e}")
    if max(logits, keys) > 1e-3:
        raise SystemExit("the training forward does not compute what transformers computes")


if __name__ == "__main__":
    main()
