# SPDX-License-Identifier: Apache-2.0
"""pi0 and pi0.5 of any size, in the files that LeRobot saves.

Source of the sizes: LeRobot's and openpi's public code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.model_shapes import Shapes
from edgellm_ros.builder.policies.pi.openpi import PROMPT_TOKENS

PALIGEMMA = "model.paligemma_with_expert.paligemma"
TEXT = f"{PALIGEMMA}.model.language_model"
TOWER = f"{PALIGEMMA}.model.vision_tower.vision_model"
PROJECTOR = f"{PALIGEMMA}.model.multi_modal_projector.linear"
EXPERT = "model.paligemma_with_expert.gemma_expert.model"
HEADS, TOWER_HEADS = 8, 16

Steps = list[tuple[str, dict[str, Any]]]  # names and settings of a processor's steps


@dataclass(frozen=True)
class PiSizes:
    """Sizes of a model; the defaults are those of the published ones."""

    kind: str = "pi05"  # or "pi0"
    hidden: int = 2048
    inner: int = 16384
    layers: int = 18
    head_dim: int = 256
    expert_hidden: int = 1024
    expert_inner: int = 4096
    vision_hidden: int = 1152
    vision_inner: int = 4304
    vision_layers: int = 27
    image_size: int = 224
    patch: int = 14
    vocab_size: int = 257152
    state_dim: int = 32
    action_dim: int = 32
    horizon: int = 50

    @property
    def adaptive(self) -> bool:
        """Tell whether the time scales the expert's norms."""
        return self.kind == "pi05"

    def shards(self) -> list[Shapes]:
        """Return the tensors of each file, the first ones without layers."""
        hidden, expert = self.hidden, self.expert_hidden
        first: Shapes = {
            f"{PALIGEMMA}.lm_head.weight": (self.vocab_size, hidden),
            f"{TEXT}.norm.weight": (hidden,),
            **_linear(PROJECTOR, hidden, self.vision_hidden),
            **_linear("model.action_in_proj", expert, self.action_dim),
            **_linear("model.action_out_proj", self.action_dim, expert),
            **self._norm(f"{EXPERT}.norm", expert, self.adaptive),
        }
        if self.adaptive:
            for name in ("time_mlp_in", "time_mlp_out"):
                first |= _linear(f"model.{name}", expert, expert)
        else:
            first |= _linear("model.state_proj", expert, self.state_dim)
            first |= _linear("model.action_time_mlp_in", expert, 2 * expert)
            first |= _linear("model.action_time_mlp_out", expert, expert)
        layers = [
            self._layer(f"{TEXT}.layers.{i}", hidden, self.inner, False)
            | self._layer(f"{EXPERT}.layers.{i}", expert, self.expert_inner, self.adaptive)
            for i in range(self.layers)
        ]
        return [first, self._tower(), *layers]

    def _layer(self, prefix: str, hidden: int, inner: int, adaptive: bool) -> Shapes:
        q, kv = HEADS * self.head_dim, self.head_dim
        return {
            **self._norm(f"{prefix}.input_layernorm", hidden, adaptive),
            **self._norm(f"{prefix}.post_attention_layernorm", hidden, adaptive),
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }

    def _tower(self) -> Shapes:
        size, inner = self.vision_hidden, self.vision_inner
        tensors: Shapes = {
            f"{TOWER}.embeddings.patch_embedding.weight": (size, 3, self.patch, self.patch),
            f"{TOWER}.embeddings.patch_embedding.bias": (size,),
            f"{TOWER}.embeddings.position_embedding.weight": ((self.image_size // self.patch) ** 2, size),
            **_affine(f"{TOWER}.post_layernorm", size),
        }
        for i in range(self.vision_layers):
            layer = f"{TOWER}.encoder.layers.{i}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                tensors |= _linear(f"{layer}.self_attn.{name}", size, size)
            tensors |= _linear(f"{layer}.mlp.fc1", inner, size) | _linear(f"{layer}.mlp.fc2", size, inner)
            tensors |= _affine(f"{layer}.layer_norm1", size) | _affine(f"{layer}.layer_norm2", size)
        return tensors

    def _norm(self, name: str, size: int, adaptive: bool) -> Shapes:
        if adaptive:
            return _linear(f"{name}.dense", 3 * size, self.expert_hidden)
        return {f"{name}.weight": (size,)}


SMALL = PiSizes(
    hidden=256,
    inner=512,
    layers=4,
    head_dim=32,
    expert_hidden=128,
    expert_inner=256,
    vision_hidden=128,
    vision_inner=256,
    vision_layers=4,
    vocab_size=1000,
)
SIZES = {
    "pi05": PiSizes(),
    "pi0": PiSizes("pi0"),
    "pi05-small": SMALL,
    "pi0-small": replace(SMALL, kind="pi0"),
}


def parse_sizes(text: str) -> PiSizes:
    """Parse a name of SIZES with optional changes, such as "pi05,layers=2".

    ValueError for an unknown name or key, or a value that is not a number.
    """
    name, *changes = text.split(",")
    if name not in SIZES:
        raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(SIZES)}")
    names = [each.name for each in fields(PiSizes) if each.type == "int"]
    values: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in names or not value.isdecimal():
            raise ValueError(f"expected KEY=NUMBER with a key of {', '.join(names)}, got {change!r}")
        values[key] = int(value)
    return replace(SIZES[name], **values)


def policy_config(
    sizes: PiSizes, cameras: Mapping[str, tuple[int, int]], state: int, actions: int
) -> dict[str, Any]:
    """Make `config.json` as LeRobot 0.6 writes it.

    cameras: height and width of their frames.
    """
    images = {f"observation.images.{name}": feature("VISUAL", 3, *size) for name, size in cameras.items()}
    way = "QUANTILES" if sizes.adaptive else "MEAN_STD"
    return {
        "type": sizes.kind,
        "n_obs_steps": 1,
        "input_features": {**images, "observation.state": feature("STATE", state)},
        "output_features": {"action": feature("ACTION", actions)},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": way, "ACTION": way},
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": sizes.horizon,
        "n_action_steps": sizes.horizon,
        "max_state_dim": sizes.state_dim,
        "max_action_dim": sizes.action_dim,
        "num_inference_steps": 10,
        "min_period": 0.004,
        "max_period": 4.0,
        "image_resolution": [sizes.image_size, sizes.image_size],
        "empty_cameras": 0,
        "tokenizer_max_length": PROMPT_TOKENS[sizes.kind],
        "use_relative_actions": False,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": None,
    }


def processor_steps(config: dict[str, Any], relative: bool = True) -> tuple[Steps, Steps]:
    """Return the steps of both processors.

    relative: whether they have those of relative actions, as since LeRobot 0.5.1.
    """
    tokenizer = {
        "max_length": config["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "google/paligemma-3b-pt-224",
    }
    inputs, outputs = config["input_features"], config["output_features"]
    norm_map = config["normalization_mapping"]
    normaliser = ("normalizer_processor", {"eps": 1e-8, "features": inputs | outputs, "norm_map": norm_map})
    words, device = ("tokenizer_processor", tokenizer), ("device_processor", {"device": "cuda"})
    off = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    differences: Steps = [("relative_actions_processor", off)] if relative else []
    sums: Steps = [("absolute_actions_processor", {"enabled": False})] if relative else []
    before: Steps = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {})]
    if config["type"] == "pi05":
        prompt: tuple[str, dict[str, Any]] = ("pi05_prepare_state_tokenizer_processor_step", {})
        before += [*differences, normaliser, prompt, words, device]
    else:
        before += [("pi0_new_line_processor", {}), words, device, *differences, normaliser]
    unnormaliser = ("unnormalizer_processor", {"eps": 1e-8, "features": outputs, "norm_map": norm_map})
    return before, [unnormaliser, *sums, ("device_processor", {"device": "cpu"})]


def feature(kind: str, *shape: int) -> dict[str, Any]:
    """Describe a feature as LeRobot does."""
    return {"type": kind, "shape": list(shape)}


def _linear(name: str, fan_out: int, fan_in: int) -> Shapes:
    return {f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)}


def _affine(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
