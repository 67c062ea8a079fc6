# SPDX-License-Identifier: Apache-2.0
"""SmolVLA with random weights, as LeRobot computes and saves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import lerobot_policies
import numpy as np
import torch
import transformers
from policy_shapes import SMOLVLA_SHAPES, SmolVLAShape
from recorded_policies import CHECKPOINT, TASK, Answer, frames_of, noise, write_answers

from fixtures.tiny_checkpoint import make_tokenizer

SMALL = {"num_vlm_layers": 4, "chunk_size": 8, "n_action_steps": 8, "resize_imgs_with_padding": (64, 64)}


class _Cache(transformers.DynamicCache):
    """The cache of transformers 5.4, which LeRobot 0.6.1 asks for.

    `crop` takes the length that stays. In newer versions of transformers it takes the length that goes.
    """

    def crop(self, length: int) -> None:
        for layer in self.layers:
            layer.crop(length - layer.get_seq_length())


class SmolVLAReference:
    """LeRobot's policy and processors.

    `checkpoint` is the folder that they save, `vlm` that of the VLM.
    """

    def __init__(self, shape: SmolVLAShape, folder: Path, seed: int) -> None:
        modeling, with_expert, processors = lerobot_policies.smolvla()
        from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
        from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

        self.shape, self.vlm, self.checkpoint = shape, folder / "vlm", folder / CHECKPOINT
        _write_vlm(shape, self.vlm)
        # the processor is asked for the ids of two tokens, which add_image_special_tokens would use
        tokens = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
        with_expert.AutoProcessor = SimpleNamespace(
            from_pretrained=lambda name: SimpleNamespace(tokenizer=tokens)
        )
        if hasattr(with_expert, "DynamicCache"):
            with_expert.DynamicCache = _Cache
        torch.manual_seed(seed)
        images = {
            f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
            for name, size in shape.cameras.items()
        }
        state = {"observation.state": PolicyFeature(FeatureType.STATE, (shape.state,))}
        self.config = SmolVLAConfig(
            input_features=images | state,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (shape.actions,))},
            vlm_model_name=str(self.vlm),
            load_vlm_weights=False,
            device="cpu",
            normalization_mapping={kind: NormalizationMode(way) for kind, way in shape.ways.items()},
            **{**SMALL, **shape.policy},
        )
        self.policy = modeling.SmolVLAPolicy(self.config).eval().float()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1:
                    parameter.copy_(values * 0.1 + (1.0 if "norm" in name and "bias" not in name else 0.0))
                else:
                    parameter.copy_(values * parameter[0].numel() ** -0.5)
        rng = np.random.default_rng(seed)
        self.stats = {
            name: {
                "mean": torch.tensor(rng.normal(size=size), dtype=torch.float32),
                "std": torch.tensor(rng.uniform(0.2, 3.0, size), dtype=torch.float32),
                "min": torch.tensor(rng.uniform(-3, -1, size), dtype=torch.float32),
                "max": torch.tensor(rng.uniform(1, 3, size), dtype=torch.float32),
                "q01": torch.tensor(rng.uniform(-2, -1, size), dtype=torch.float32),
                "q99": torch.tensor(rng.uniform(1, 2, size), dtype=torch.float32),
            }
            for name, size in (("observation.state", shape.state), ("action", shape.actions))
        }
        self.before, self.after = processors.make_smolvla_pre_post_processors(self.config, self.stats)

    def save(self) -> Path:
        """Save policy and processors as LeRobot does, and return their folder."""
        self.policy.save_pretrained(self.checkpoint)
        self.before.save_pretrained(self.checkpoint)
        self.after.save_pretrained(self.checkpoint)
        return self.checkpoint

    def batch(self, task: str, state: np.ndarray, frames: Mapping[str, np.ndarray]) -> dict:
        """Make the policy's inputs of frames [H, W, 3] uint8, as LeRobot's processors do."""
        images = {
            f"observation.images.{name}": torch.tensor(frame).permute(2, 0, 1).float() / 255
            for name, frame in frames.items()
        }
        return self.before({"observation.state": torch.tensor(state), "task": task, **images})

    @property
    def self_layers(self) -> list[bool]:
        """Whether actions attend to each other in a layer."""
        config, count = self.config, self.policy.model.vlm_with_expert.num_vlm_layers
        every = config.self_attn_every_n_layers if "cross" in config.attention_mode else 1
        return [layer % every == 0 for layer in range(count)]

    def actions(self, batch: dict, noise: np.ndarray, **options) -> np.ndarray:
        """Compute physical actions [n, T, actions] from noise [n, T, max_action_dim]."""
        batch = {
            name: value.expand(len(noise), *value.shape[1:]) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        chunk = self.policy.predict_action_chunk(batch, noise=torch.tensor(noise), **options)
        return self.after(chunk).numpy()

    @torch.no_grad()
    def prefix(self, batch: dict):
        """Compute the prefix: embeddings, padding mask, keys and values by layer.

        Embeddings are [1,S,H], the mask is [1,S].
        """
        images, masks = self.policy.prepare_images(batch)
        model, modeling = self.policy.model, lerobot_policies.smolvla()[0]
        state = self.policy.prepare_state(batch)
        tokens = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        embeds, padding, attention = model.embed_prefix(images, masks, *tokens, state=state)
        _, cache = model.vlm_with_expert.forward(
            attention_mask=modeling.make_att_2d_masks(padding, attention),
            position_ids=torch.cumsum(padding, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embeds, None],
            use_cache=True,
            fill_kv_cache=True,
        )
        return embeds, padding, cache

    @torch.no_grad()
    def velocity(self, prefix, x: np.ndarray, time: float) -> np.ndarray:
        """Compute the velocity [n, T, max_action_dim] at x and a time."""
        _, padding, cache = prefix
        samples = len(x)
        cache = {
            layer: {name: value.expand(samples, *value.shape[1:]) for name, value in each.items()}
            for layer, each in cache.items()
        }
        times = torch.full((samples,), time, dtype=torch.float32)
        return self.policy.model.denoise_step(
            padding.expand(samples, -1), cache, torch.tensor(x), times
        ).numpy()


def record_smolvla(name: str, folder: Path) -> None:
    """Save a SmolVLA of SMOLVLA_SHAPES, and LeRobot's actions."""
    shape, seed = SMOLVLA_SHAPES[name], list(SMOLVLA_SHAPES).index(name)
    reference = SmolVLAReference(shape, folder, seed)
    reference.save()
    state = np.random.default_rng(seed).normal(size=shape.state).astype(np.float32)
    start = noise(2, reference.config.chunk_size, reference.config.max_action_dim)
    frames, _ = frames_of(shape.cameras, seed)
    actions = reference.actions(reference.batch(TASK, state, frames), start)
    write_answers(folder, [Answer(frames, state, actions)])


def _write_vlm(shape: SmolVLAShape, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    config = {
        "model_type": "smolvlm",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "scale_factor": shape.scale_factor,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": shape.vision_hidden,
            "num_attention_heads": shape.vision_heads,
            "num_hidden_layers": shape.vision_depth,
            "intermediate_size": 56,
            "image_size": shape.image_size,
            "patch_size": shape.patch_size,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": 80,
            "num_hidden_layers": shape.vlm_layers,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 512,
            "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
