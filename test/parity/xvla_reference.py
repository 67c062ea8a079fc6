# SPDX-License-Identifier: Apache-2.0
"""X-VLA with random weights, as LeRobot computes and saves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import lerobot_policies
import numpy as np
import torch
import transformers
from recorded_policies import CHECKPOINT, TASK, Answer, frames_of, noise, write_answers
from xvla_shapes import XVLA_SHAPES, XVLAShape

from fixtures.xvla_checkpoint import bart_tokenizer

SMALL = {
    "hidden_size": 32, "depth": 3, "num_heads": 4, "num_domains": 3, "len_soft_prompts": 4, "chunk_size": 7,
    "n_action_steps": 7, "max_state_dim": 22, "tokenizer_max_length": 48, "max_len_seq": 200, "dim_time": 8,
    "num_denoising_steps": 5, "resize_imgs_with_padding": (64, 64), "dtype": "float32",
}  # fmt: skip
SAMPLES = 2
IMAGENET = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}


class XVLAReference:
    """LeRobot's policy and processors, saved and loaded again.

    `checkpoint` is their folder.
    """

    def __init__(self, shape: XVLAShape, folder: Path, seed: int) -> None:
        # transformers 5 has no such defaults, which LeRobot's copy of Microsoft's code asks for
        for name in ("forced_bos_token_id", "pad_token_id", "bos_token_id", "eos_token_id"):
            if not hasattr(transformers.PreTrainedConfig, name):
                setattr(transformers.PreTrainedConfig, name, None)
        modeling, processors = lerobot_policies.xvla()
        if not isinstance(processors.IMAGENET_STATS, dict):  # of a module of data sets, which is empty here
            processors.IMAGENET_STATS = IMAGENET
        from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
        from lerobot.policies.xvla.configuration_xvla import XVLAConfig

        self.shape, self.checkpoint = shape, folder / CHECKPOINT
        tokenizer = folder / "tokenizer"
        vocab_size = _write_tokenizer(tokenizer)
        torch.manual_seed(seed)
        images = {
            f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
            for name, size in shape.cameras.items()
        }
        state = {"observation.state": PolicyFeature(FeatureType.STATE, (shape.state,))}
        config = XVLAConfig(
            input_features=images | state,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (shape.actions,))},
            tokenizer_name=str(tokenizer),
            device="cpu",
            normalization_mapping={kind: NormalizationMode(way) for kind, way in shape.ways.items()},
            florence_config=_florence(shape, vocab_size),
            **{**SMALL, **shape.policy},
        )
        policy = modeling.XVLAPolicy(config).eval()
        _fill(policy, seed)
        stats = _stats(shape, seed)
        self.before, self.after = processors.make_xvla_pre_post_processors(config, stats)
        for step in self.before.steps:
            if isinstance(step, processors.XVLAAddDomainIdProcessorStep):
                step.domain_id = shape.domain
        if shape.is_target:
            self.after.steps.insert(1, processors.XVLARotation6DToAxisAngleProcessorStep())
        for each in (policy, self.before, self.after):
            each.save_pretrained(self.checkpoint)
        # A loaded policy may count more images than the one that was saved. Weights in bfloat16 are computed
        # with in fp32, as in the engine.
        self.policy = modeling.XVLAPolicy.from_pretrained(self.checkpoint).float()
        self.policy.config.dtype = "float32"

    def batch(self, task: str, state: np.ndarray, frames: Mapping[str, np.ndarray]) -> dict:
        """Make the policy's inputs of frames [H, W, 3] uint8, as LeRobot's processors do."""
        images = {
            f"observation.images.{name}": torch.tensor(frame).permute(2, 0, 1).float() / 255
            for name, frame in frames.items()
        }
        return self.before({"observation.state": torch.tensor(state), "task": task, **images})

    def actions(self, batch: dict, noise: np.ndarray) -> np.ndarray:
        """Compute physical actions [n, T, actions] from noise [n, T, values].

        The policy draws its noise, so it computes one sample after another.
        """
        chunks = []
        for each in noise:
            with mock.patch.object(torch, "randn", lambda *size, each=each, **_: torch.tensor(each[None])):
                chunk = self.policy.predict_action_chunk(batch)
            chunks.append(torch.stack([self.after(action)[0] for action in chunk.transpose(0, 1)]))
        return torch.stack(chunks).numpy()


def record_xvla(name: str, folder: Path) -> None:
    """Save an X-VLA of XVLA_SHAPES, and LeRobot's actions."""
    shape, seed = XVLA_SHAPES[name], list(XVLA_SHAPES).index(name)
    reference = XVLAReference(shape, folder, seed)
    state = np.random.default_rng(seed).normal(size=shape.state).astype(np.float32)
    model = reference.policy.model
    start = noise(SAMPLES, model.chunk_size, model.dim_action)
    frames = {each: frame for each, frame in frames_of(shape.cameras, seed)[0].items()}
    for each in shape.missing:
        del frames[each]
    actions = reference.actions(reference.batch(TASK, state, frames), start)
    write_answers(folder, [Answer(frames, state, actions)])


@torch.no_grad()
def _fill(policy: torch.nn.Module, seed: int) -> None:
    """Give a policy random weights, of a size that keeps that of values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 or name.endswith("bias.weight"):
            values = values * 0.1 + (1.0 if "norm" in name and not name.endswith("bias") else 0.0)
        elif name.endswith(".fc.weight"):  # a matrix for each domain
            values *= policy.config.hidden_size**-0.5
        elif name.endswith(("pos_emb", "soft_prompt_hub.weight")):
            values *= 0.5
        else:
            values *= parameter[0].numel() ** -0.5
        parameter.copy_(values)


def _stats(shape: XVLAShape, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    ranges = {
        "mean": (-1, 1),
        "std": (0.2, 3),
        "min": (-3, -1),
        "max": (1, 3),
        "q01": (-2, -1),
        "q99": (1, 2),
    }
    return {
        name: {
            key: torch.tensor(rng.uniform(*ends, size), dtype=torch.float32) for key, ends in ranges.items()
        }
        for name, size in (("observation.state", shape.state), ("action", shape.actions))
    }


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer; return the size of its vocabulary."""
    folder.mkdir(parents=True)
    tokenizer = bart_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def _florence(shape: XVLAShape, vocab_size: int) -> dict:
    """Return the configuration of Florence-2.

    The layout is Microsoft's, which every version reads.
    """
    return {
        "projection_dim": shape.hidden,
        "vision_config": {
            "model_type": "davit",
            "dim_embed": list(shape.sizes),
            "depths": list(shape.depths),
            "num_heads": list(shape.tower_heads),
            "num_groups": list(shape.groups),
            "patch_size": list(shape.kernels),
            "patch_stride": list(shape.strides),
            "patch_padding": list(shape.paddings),
            "patch_prenorm": list(shape.norms_first),
            "window_size": shape.window,
            "projection_dim": shape.hidden,
            "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 11},
            "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 6},
            "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        },
        "text_config": {
            "vocab_size": vocab_size,
            "d_model": shape.hidden,
            "encoder_layers": shape.text_layers,
            "encoder_attention_heads": shape.heads,
            "encoder_ffn_dim": 40,
            "decoder_layers": 1,
            "decoder_attention_heads": shape.heads,
            "decoder_ffn_dim": 16,
            "max_position_embeddings": 128,
        },
    }
