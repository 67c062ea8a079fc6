# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of GR00T."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.policies.groot.architecture import Backbone
from edgellm_ros.builder.policies.groot.eagle import read_eagle
from edgellm_ros.builder.policies.groot.qwen import read_qwen
from edgellm_ros.builder.weights.weights import Weights

EAGLE_FILES = (
    "gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2 of NVIDIA's Isaac-GR00T, branch n1.6-release, has them"
)


@dataclass(frozen=True)
class Version:
    """A version of GR00T."""

    model_type: str  # in config.json
    backbone: str  # value of `backbone_model_type`
    # Reads the backbone: GR00T's configuration, folder of the vision language model, weights.
    read_backbone: Callable[[ConfigSection, Path, Weights], Backbone]
    vlm: str  # name of the vision language model
    vlm_files: tuple[str, ...]
    vlm_source: str  # where these files are; "" = on the Hugging Face hub
    image_token: str  # key of the token of images in its config.json
    numbered_images: bool  # whether the processor replaces numbered placeholders of the chat template
    images_last: bool  # whether images follow the task in a prompt
    no_task: str  # the task of a request without one
    width: int  # values of a state and of an action, unless config.json tells them; also below
    horizon: int
    short_side: int  # pixels of a resized image, unless processor_config.json tells them
    # whether `use_albumentations` keeps the aspect ratio also without `shortest_image_edge`
    always_kept: bool
    # whether images are filled up before they become squares, unless processor_config.json tells it
    boxed_squares: bool
    # layers behind the backbone, unless config.json tells them; None: the version has none
    vl_layers: Mapping[str, Any] | None


N1_7 = Version(
    model_type="Gr00tN1d7",
    backbone="qwen",
    read_backbone=read_qwen,
    vlm="nvidia/Cosmos-Reason2-2B",
    vlm_files=("config.json", TOKENIZER_FILE, "preprocessor_config.json"),
    vlm_source="",
    image_token="image_token_id",
    numbered_images=False,
    images_last=False,
    no_task="Perform the task.",
    width=132,
    horizon=40,
    short_side=256,
    always_kept=False,
    boxed_squares=False,
    vl_layers={
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
    },
)
N1_6 = Version(
    model_type="Gr00tN1d6",
    backbone="eagle",
    read_backbone=read_eagle,
    vlm="nvidia/Eagle-Block2A-2B-v2",
    vlm_files=("config.json", "preprocessor_config.json", "processor_config.json"),
    vlm_source=EAGLE_FILES,
    image_token="image_token_index",
    numbered_images=True,
    images_last=True,
    no_task="",
    width=29,
    horizon=16,
    short_side=512,
    always_kept=True,
    boxed_squares=True,
    vl_layers=None,
)
VERSIONS = {version.model_type: version for version in (N1_6, N1_7)}
