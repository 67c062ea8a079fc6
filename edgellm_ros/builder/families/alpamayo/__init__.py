# SPDX-License-Identifier: Apache-2.0
"""Alpamayo-R1 and 1.5 as published: a Qwen3-VL (`vlm.*`) and a flow expert.

The published folder only names its Qwen3-VL, whose configuration, tokenizer and image processor are read from
the folder `vlm` in the checkpoint.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgellm_ros.builder.action.expert_config import Expert
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.families import Family, qwen3_vl
from edgellm_ros.builder.families.alpamayo.expert import read_expert
from edgellm_ros.builder.families.alpamayo.prompts import prompt_files, read_vocabulary
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.config import GenerationDefaults
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig

VLM_FOLDER = "vlm"
PLACEHOLDERS = "image_token_id", "video_token_id"
VLM_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
MODEL_TYPES = "alpamayo1_5", "alpamayo_r1"
PIXELS = {"min_pixels": 163840, "max_pixels": 196608}  # of an image, in the published inference
SAMPLING = GenerationDefaults(temperature=0.6, top_p=0.98)  # in the published inference


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    vlm = _find_vlm(checkpoint, config)
    tensors = weights.renamed(
        {name.removeprefix("vlm."): name for name in weights if name.startswith("vlm.")}
    )
    section = read_section(vlm / "config.json")
    section.one_of("model_type", [qwen3_vl.MODEL_TYPE])
    vocabulary = read_vocabulary(vlm, config)
    model = qwen3_vl.read(vlm, _with_vocabulary(section, vocabulary.size), tensors)
    model = _with_pixels(model, config)
    # An answer is read a second time where navigation guides actions: a placeholder in it would be an image.
    placeholders = (section.integer(key) for key in PLACEHOLDERS if section.has(key))
    expert = Expert(
        read_expert(config, section.section("text_config"), model.llm, vocabulary), _of_expert(weights)
    )
    return dataclasses.replace(
        model,
        weights=tensors,
        expert=expert,
        prompts=prompt_files(vocabulary, f"{config.where}: chat template"),
        generation=SAMPLING,
        input_tokens=(*vocabulary.trajectory_tokens, *placeholders),
    )


def _find_vlm(checkpoint: Path, config: ConfigSection) -> Path:
    """Find the folder of the Qwen3-VL; FileNotFoundError tells where to get it."""
    config.one_of("vlm_backend", ["qwenvl3"], default="qwenvl3")
    folder = checkpoint / VLM_FOLDER
    for name in VLM_FILES[:1] + VLM_FILES[2:4]:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} not found: the checkpoint only names its language model: hf download "
                f"{config.text('vlm_name_or_path')} {' '.join(VLM_FILES)} --local-dir {folder}"
            )
    return folder


def _with_vocabulary(section: ConfigSection, size: int) -> ConfigSection:
    """Return the configuration of the Qwen3-VL with the tokens that Alpamayo adds."""
    text = {**section.section("text_config").data, "vocab_size": size}
    return ConfigSection({**section.data, "text_config": text}, section.where)


def _with_pixels(model: Model, config: ConfigSection) -> Model:
    """Return the model with Alpamayo's image sizes in place of those of the Qwen3-VL."""
    low, high = (config.size(key, default) for key, default in PIXELS.items())
    vision = model.vision
    assert isinstance(vision, Qwen3VisionConfig)
    changed = config.make(lambda: dataclasses.replace(vision, min_pixels=low, max_pixels=high))
    return dataclasses.replace(model, vision=changed)


def _of_expert(weights: Weights) -> Weights:
    """Return the expert's tensors under the names of `build_expert`."""
    prefixes = {"expert.": "", "action_out_proj.": "out_proj.", "action_in_proj.": "action_in_proj."}
    return weights.renamed(
        {
            new + name.removeprefix(old): name
            for old, new in prefixes.items()
            for name in weights
            if name.startswith(old)
        }
    )


FAMILY = Family("alpamayo", MODEL_TYPES, read)
