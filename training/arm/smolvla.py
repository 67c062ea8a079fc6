# SPDX-License-Identifier: Apache-2.0
"""LeRobot's SmolVLA for the second world: 11 million weights, at first random.

A vision tower and text layers see the picture, the instruction and the joints; an action expert computes the
velocity of a chunk by attention to their keys and values.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lerobot.policies.smolvla import smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from tokenizers import Tokenizer, normalizers
from torch import Tensor

from edgellm_ros.builder.policies.vlm import VLM_FOLDER
from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import IMAGE_SIZE, INSTRUCTIONS
from training.arm.kind import ACTION, Batch, PolicyKind, Processors, Statistics, shared_settings
from training.tokenizer import PAD, byte_level_bpe

IMAGE_TOKEN = "<image>"  # of SmolVLM's chat template, which SmolVLA does not use
MOST_TOKENS = 320  # of the vocabulary: all bytes, and the words of the instructions
LAYERS = 4
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 16,
}

# LeRobot asks the processor only for the ids of tokens that add_image_special_tokens would use. SmolVLM's own
# would need files that no other step reads.
_TOKENS = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
smolvlm_with_expert.AutoProcessor = SimpleNamespace(
    from_pretrained=lambda name: SimpleNamespace(tokenizer=_TOKENS)
)


class SmolVla(PolicyKind):
    """SmolVLA with an expert as wide as its text layers."""

    name, rate = "smolvla", 5e-4

    def make(self, device: str, folder: Path) -> SmolVLAPolicy:
        """Make a policy with random weights.

        Writes tokenizer and configuration of its vision language model, which LeRobot reads there.
        """
        write_vlm(folder / VLM_FOLDER)
        config = SmolVLAConfig(
            **shared_settings(device),
            max_state_dim=len(JOINTS),
            max_action_dim=len(JOINTS),
            resize_imgs_with_padding=(IMAGE_SIZE, IMAGE_SIZE),
            tokenizer_max_length=16,
            vlm_model_name=str(folder / VLM_FOLDER),
            load_vlm_weights=False,
            freeze_vision_encoder=False,
            train_expert_only=False,
            num_vlm_layers=LAYERS,
            expert_width_multiplier=1.0,
        )
        return SmolVLAPolicy(config).to(device)

    def processors(self, policy: SmolVLAPolicy, statistics: Statistics) -> Processors:
        """Make LeRobot's processors."""
        return make_smolvla_pre_post_processors(policy.config, statistics)

    def compile(self, policy: SmolVLAPolicy) -> None:
        """Let PyTorch compile the model's method that LeRobot calls."""
        policy.model.forward = torch.compile(policy.model.forward)

    def load(self, folder: Path, config: SmolVLAConfig) -> tuple[SmolVLAPolicy, dict[str, Any]]:
        """Load a policy, whose vision language model is in its folder."""
        config.vlm_model_name = vlm = str(folder / VLM_FOLDER)
        policy = SmolVLAPolicy.from_pretrained(folder, config=config)
        return policy, {"tokenizer_processor": {"tokenizer_name": vlm}}

    def loss(self, policy: SmolVLAPolicy, batch: Batch) -> Tensor:
        """Compute LeRobot's loss, without the actions after the end.

        Noise and times are drawn outside of what is compiled.
        """
        actions, model = policy.prepare_action(batch), policy.model
        noise = model.sample_noise(actions.shape, actions.device)
        times = model.sample_time(len(actions), actions.device)
        # LeRobot 0.4.4 asks for this name of the mask
        return policy.forward(batch | {"actions_id_pad": batch[f"{ACTION}_is_pad"]}, noise, times)[0]


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer that has a token for each word of the instructions."""
    texts = [f"{text}\n" for text in INSTRUCTIONS.values()]
    return byte_level_bpe(texts, MOST_TOKENS, normalizers.NFC(), (PAD, IMAGE_TOKEN))


def write_vlm(folder: Path) -> None:
    """Write the configuration and the tokenizer of the vision language model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    padding, image = (tokenizer.token_to_id(name) for name in (PAD, IMAGE_TOKEN))
    config = {
        "model_type": "smolvlm",
        "image_token_id": image,
        "pad_token_id": padding,
        "scale_factor": 1,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "smolvlm_vision", **VISION},
        "text_config": {
            "model_type": "llama",
            **TEXT,
            "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": padding,
        },
    }
    files = {
        "config.json": config,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
