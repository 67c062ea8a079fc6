# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6 and N1.7 as NVIDIA saves them, N1.7 also as LeRobot does.

The model has the vision tower and first layers of a vision language model, and a diffusion transformer that
attends to them. Encoders of state and actions, and the decoder of actions, are those of one embodiment.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies import LargeLayers, Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.groot.architecture import HEAD, Backbone
from edgellm_ros.builder.policies.groot.cameras import read_cameras
from edgellm_ros.builder.policies.groot.config import read_architecture
from edgellm_ros.builder.policies.groot.dit import build_dit
from edgellm_ros.builder.policies.groot.embodiment import read_actions, read_state
from edgellm_ros.builder.policies.groot.lerobot import read_lerobot
from edgellm_ros.builder.policies.groot.nvidia import read_nvidia
from edgellm_ros.builder.policies.groot.prefix import build_prefix
from edgellm_ros.builder.policies.groot.prompt import groot_tokenizer, read_prompt
from edgellm_ros.builder.policies.groot.version import VERSIONS
from edgellm_ros.builder.policies.vlm import find_vlm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.engine_directory.files import PREFIX

MAX_PROMPT_TOKENS = 256  # of a task, with what the chat template puts around it


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    layout = read_lerobot if config.has("type") else read_nvidia
    source = layout(checkpoint, config, weights, sources.embodiment)
    model, embodiment, weights = source.model, source.embodiment, source.weights
    version = source.version
    name = model.text("model_name") if model.has("model_name") else version.vlm
    vlm = find_vlm(checkpoint, name, sources.vlm, version.vlm_files, "a GR00T", source=version.vlm_source)
    backbone = version.read_backbone(model, vlm, weights)
    architecture = read_architecture(model, version, backbone, weights, embodiment.number)
    llm, images = backbone.decoder.config, len(source.cameras) * source.frames
    tokenizer = groot_tokenizer(vlm, llm.vocab_size)
    prompt = read_prompt(vlm, version, images, tokenizer)
    names = sources.dataset if source.named else None
    policy = config.make(
        GrootConfig,
        cameras=config.make(
            partial(read_cameras, source.cameras, source.frames, source.crop, backbone.vision)
        ),
        state=read_state(embodiment, config, names, architecture.state_dim),
        action_space=read_actions(embodiment, config, sources.dataset, names, architecture),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        prompt_before=prompt.before,
        prompt_after=prompt.after,
        num_denoise_steps=source.denoise_steps,
        vision=backbone.vision,
        images_last=version.images_last,
        image_places=prompt.image_places,
        task_before=prompt.task_before,
        task_after=prompt.task_after,
        no_task=version.no_task,
        plain_words=source.plain_words,
        embodiment=embodiment.tag,
    )
    return PolicyModel(
        policy,
        llm,
        tokenizer.contents,
        {
            "visual": partial(backbone.build_vision, weights),
            PREFIX: partial(build_prefix, architecture, weights),
            "action": partial(build_dit, architecture, weights),
        },
        layers=LargeLayers(weights, _large_modules(backbone)),
    )


def _large_modules(backbone: Backbone) -> tuple[str, ...]:
    """List the modules of `LargeLayers`."""
    head = f"{HEAD}.model.transformer_blocks", f"{HEAD}.vl_self_attention"
    return *backbone.large_modules, backbone.decoder.prefix, *head


POLICY = Policy("groot", read, model_types=tuple(VERSIONS), embodiments=True)
