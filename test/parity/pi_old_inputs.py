# SPDX-License-Identifier: Apache-2.0
"""What LeRobot 0.4.4 saves beside the weights of a pi0 or pi0.5.

Also what it feeds to the model.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lerobot_policies
import numpy as np
import torch
from pi_cases import TASK, Observation, PiShape, write_tokenizer


def write_old_inputs(shape: PiShape, folder: Path, seed: int) -> None:
    """Write what LeRobot saves to `folder/old`, the inputs to `folder/old.npz`.

    Saved are configuration and processors. The inputs are those of the model: `tokens`, `attention_mask`, and
    `image_*` of each camera from -1 to 1.
    """
    configuration, modeling, processors = lerobot_policies.pi(shape.kind)
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.processor import tokenizer_processor
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder / "vlm")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "vlm")
    seen, name = Observation(shape, seed), "PI05" if shape.kind == "pi05" else "PI0"
    features = [
        {key: PolicyFeature(FeatureType(kind), size) for key, (kind, size) in each.items()}
        for each in shape.features()
    ]
    config = getattr(configuration, f"{name}Config")(
        input_features=features[0],
        output_features=features[1],
        normalization_mapping={k: NormalizationMode(way) for k, way in shape.normalization.items()},
        **shape.config,
    )
    stats = {
        key: {each: torch.tensor(values) for each, values in own.items()} for key, own in seen.stats.items()
    }
    found = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    with mock.patch.object(tokenizer_processor, "AutoTokenizer", found):  # and not in later tests
        before, after = getattr(processors, f"make_{shape.kind}_pre_post_processors")(config, stats)
    for part in (config, before, after):
        part.save_pretrained(folder / "old")
    images = {
        f"observation.images.{camera}": torch.tensor(frame).permute(2, 0, 1).float() / 255
        for camera, frame in seen.frames.items()
    }
    batch = before({"observation.state": torch.tensor(seen.state), "task": TASK, **images})
    policy = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))
    prepared, _ = getattr(modeling, f"{name}Policy")._preprocess_images(policy, batch)
    arrays = {f"image_{camera}": image.numpy() for camera, image in zip(seen.frames, prepared, strict=True)}
    for part in ("tokens", "attention_mask"):
        arrays[part] = batch[f"observation.language.{part}"].numpy()
    np.savez(folder / "old.npz", **arrays)
