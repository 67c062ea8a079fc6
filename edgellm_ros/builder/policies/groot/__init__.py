# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.7 as NVIDIA or LeRobot saves it.

The model has the vision tower and first layers of a Qwen3-VL, and a diffusion transformer that attends to
them. Encoders of state and actions, and the decoder of actions, are those of one embodiment.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.families.qwen3_vl.vision import build_vision
from edgellm_ros.builder.policies import Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.groot.cameras import read_cameras
from edgellm_ros.builder.policies.groot.config import read_architecture
from edgellm_ros.builder.policies.groot.dit import build_dit
from edgellm_ros.builder.policies.groot.embodiment import read_actions, read_state
from edgellm_ros.builder.policies.groot.lerobot import read_lerobot
from edgellm_ros.builder.policies.groot.nvidia import read_nvidia
from edgellm_ros.builder.policies.groot.prefix import build_prefix
from edgellm_ros.builder.policies.groot.prompt import read_prompt
from edgellm_ros.builder.policies.vlm import find_vlm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.engine_directory.files import PREFIX

VLM_FILES = "config.json", TOKENIZER_FILE, "preprocessor_config.json"
MAX_PROMPT_TOKENS = 256  # of a task, with what the chat template puts around it


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    layout = read_lerobot if config.has("type") else read_nvidia
    source = layout(checkpoint, config, weights, sources.embodiment)
    model, embodiment, weights = source.model, source.embodiment, source.weights
    name = model.text("model_name") if model.has("model_name") else "nvidia/Cosmos-Reason2-2B"
    vlm = find_vlm(checkpoint, name, sources.vlm, VLM_FILES, "a GR00T")
    architecture = read_architecture(model, vlm, weights, embodiment.number)
    vision, llm = architecture.vision.config, architecture.decoder.config
    image_token = read_section(vlm / "config.json").integer("image_token_id")
    prompt = read_prompt(vlm, len(source.cameras) * source.frames, image_token, llm.vocab_size)
    names = sources.dataset if source.named else None
    policy = config.make(
        GrootConfig,
        cameras=read_cameras(source.cameras, source.frames, source.crop, vision),
        state=read_state(embodiment, config, names, architecture.state_dim),
        action_space=read_actions(embodiment, config, sources.dataset, names, architecture),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        prompt_before=prompt.before,
        prompt_after=prompt.after,
        num_denoise_steps=source.denoise_steps,
        vision=vision,
        image_places=prompt.image_places,
        plain_words=source.plain_words,
        embodiment=embodiment.tag,
    )
    return PolicyModel(
        policy,
        llm,
        vlm / TOKENIZER_FILE,
        {
            "visual": partial(build_vision, architecture.vision, weights),
            PREFIX: partial(build_prefix, architecture, weights),
            "action": partial(build_dit, architecture, weights),
        },
    )


POLICY = Policy("groot", read, model_types=("Gr00tN1d7",), embodiments=True)
