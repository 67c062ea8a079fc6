# SPDX-License-Identifier: Apache-2.0
"""Vision towers in files of their own (`mmproj`).

Sizes that the files leave out are constants of the published models. Source of keys and names:
ggml-org/llama.cpp, conversion/qwenvl.py, conversion/qwen3vl.py and tools/mtmd.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.gguf.keys import Keys, architecture
from edgellm_ros.builder.gguf.reader import GgufFile
from edgellm_ros.builder.gguf.tensors import GgufTensor, JoinedTensor

CLIP = "clip"  # `general.architecture` of these files
PREFIX = "model.visual."
QWEN2_5_VL, QWEN3_VL = "qwen2.5vl_merger", "qwen3vl_merger"  # values of `clip.projector_type`
EPSILON = 1e-6  # of the norms of these towers; a constant in the model code
FRAMES = 2  # of a patch; the file has a convolution for each
PIXELS = {QWEN2_5_VL: (3136, 12845056), QWEN3_VL: (65536, 16777216)}  # limits of published image processors
WINDOW = 112  # pixels, of the published towers of Qwen2.5-VL
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
QUERIES = re.compile(r"v\.blk\.(\d+)\.attn_q\.(weight|bias)")  # apart from keys and values
DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")

IN_BLOCK = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}
NAMES: dict[str, dict[str, str]] = {  # in blocks and outside
    QWEN2_5_VL: {
        **IN_BLOCK,
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "v.post_ln": "merger.ln_q",
        "mm.0": "merger.mlp.0",
        "mm.2": "merger.mlp.2",
    },
    QWEN3_VL: {
        **IN_BLOCK,
        "ffn_up": "mlp.linear_fc1",
        "ffn_down": "mlp.linear_fc2",
        "v.patch_embd": "patch_embed.proj",
        "v.position_embd": "pos_embed",
        "v.post_ln": "merger.norm",
        "mm.0": "merger.linear_fc1",
        "mm.2": "merger.linear_fc2",
    },
}
IN_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


@dataclass(frozen=True)
class Tower:
    """A vision tower for a text model."""

    file: GgufFile
    projector: str
    config: dict[str, Any]  # `vision_config`
    processor: dict[str, Any]  # `preprocessor_config.json`

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by their names in transformers; unknown ones keep theirs.

        The convolution of patches and, in some files, queries, keys and values are joined.
        """
        places = self.file.tensors
        stored = {name: GgufTensor.of(place, self._published(name)) for name, place in places.items()}
        joined: dict[str, tuple[tuple[str, ...], int | None]] = {
            f"{PREFIX}patch_embed.proj.weight": (PATCHES, 2)
        }
        for name in places:
            found = QUERIES.fullmatch(name)
            if found is not None:
                pieces = tuple(f"v.blk.{found[1]}.attn_{each}.{found[2]}" for each in "qkv")
                joined[f"{PREFIX}blocks.{found[1]}.attn.qkv.{found[2]}"] = pieces, None
        tensors: dict[str, StoredTensor] = {}
        for name, (pieces, axis) in joined.items():
            missing = next((piece for piece in pieces if piece not in places), None)
            if missing is not None:
                raise ValueError(f"{self.file.path}: tensor {missing!r} is missing")
            tensors[name] = JoinedTensor.of(name, tuple(stored.pop(piece) for piece in pieces), axis)
        return tensors | {tensor.name: tensor for tensor in stored.values()}

    def _published(self, name: str) -> str:
        """Return a tensor's name in transformers."""
        names, levels = NAMES[self.projector], self.config.get("deepstack_visual_indexes", [])
        block, deepstack = BLOCK.fullmatch(name), DEEPSTACK.fullmatch(name)
        if block is not None and block[2] in names:
            return f"{PREFIX}blocks.{block[1]}.{names[block[2]]}.{block[3]}"
        if deepstack is not None and deepstack[2] in IN_DEEPSTACK and int(deepstack[1]) in levels:
            level = levels.index(int(deepstack[1]))
            return f"{PREFIX}deepstack_merger_list.{level}.{IN_DEEPSTACK[deepstack[2]]}.{deepstack[3]}"
        module, _, tensor = name.rpartition(".")
        return f"{PREFIX}{names[module]}.{tensor}" if module in names else name


def read_tower(file: GgufFile, model: Keys, projectors: Mapping[str, str]) -> Tower:
    """Read the tower of a text model.

    projectors: values of `clip.projector_type` that the model's architecture takes. ValueError, which names
    file and key, if the file has no such tower, one of another size, or a setting that is not supported.
    """
    if architecture(file) != CLIP:
        raise Keys(file, "general").fail("architecture", "no vision tower (mmproj), which has 'clip'")
    clip, keys = Keys(file, CLIP), Keys(file, f"{CLIP}.vision")
    if file.keys.get("clip.has_audio_encoder"):
        raise clip.fail("has_audio_encoder", "encoders of sound are not supported")
    projector = clip.text("projector_type", "none")
    if projector not in projectors:
        takes = f"takes {', '.join(projectors)}" if projectors else "takes no vision tower"
        raise clip.fail("projector_type", f"{model.file.path} is {model.prefix}, which {takes}")
    hidden = model.integer("embedding_length")
    if keys.integer("projection_dim") != hidden:
        raise keys.fail("projection_dim", f"{model.file.path} has embedding_length {hidden}")
    config = _shared(keys)
    config |= _qwen2_5_vl(keys, clip) if projector == QWEN2_5_VL else _qwen3_vl(keys, clip, model)
    limits = zip(("min_pixels", "max_pixels"), PIXELS[projector], strict=True)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": config["patch_size"],
        "temporal_patch_size": FRAMES,
        "merge_size": config["spatial_merge_size"],
        "image_mean": keys.numbers("image_mean", 3),
        "image_std": keys.numbers("image_std", 3),
        **{name: keys.integer(f"image_{name}", limit) for name, limit in limits},
    }
    return Tower(file, projector, config, processor)


def _shared(keys: Keys) -> dict[str, Any]:
    """Read what both towers have."""
    key = "attention.layer_norm_epsilon"
    if keys.number(key) != EPSILON:
        raise keys.fail(key, f"expected {EPSILON}")
    return {
        "depth": keys.integer("block_count"),
        "hidden_size": keys.integer("embedding_length"),
        "num_heads": keys.integer("attention.head_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "out_hidden_size": keys.integer("projection_dim"),
        "patch_size": keys.integer("patch_size"),
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": keys.integer("spatial_merge_size", 2),
    }


def _qwen2_5_vl(keys: Keys, clip: Keys) -> dict[str, Any]:
    """Read a tower with windows.

    Every `n_wa_pattern`-th block attends to the whole image.
    """
    if clip.file.keys.get("clip.use_silu") is not True:
        raise clip.fail("use_silu", "expected true")
    depth, every = _blocks(keys), keys.integer("n_wa_pattern", least=0)
    return {
        "hidden_act": "silu",
        "window_size": keys.integer("window_size", WINDOW),
        "fullatt_block_indexes": list(range(every - 1, depth, every)) if every else list(range(depth)),
    }


def _qwen3_vl(keys: Keys, clip: Keys, model: Keys) -> dict[str, Any]:
    """Read a tower with a learned position grid, and deepstack if the model has it."""
    if clip.file.keys.get("clip.use_gelu") is not True:
        raise clip.fail("use_gelu", "expected true")
    grid, depth = keys.file.tensors.get("v.position_embd.weight"), _blocks(keys)
    if grid is None:
        raise ValueError(f"{keys.file.path}: tensor 'v.position_embd.weight' is missing")
    key = "is_deepstack_layers"
    levels = [i for i, each in enumerate(keys.flags(key, depth)) if each] if keys.has(key) else []
    expected = model.integer("n_deepstack_layers", 0, least=0)
    if len(levels) != expected:
        raise keys.fail(key, f"{model.file.path} takes {expected} deepstack features, got {len(levels)}")
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": grid.shape[0],
        "deepstack_visual_indexes": levels,
    }


def _blocks(keys: Keys) -> int:
    """Read the number of blocks, each of which has tensors."""
    depth, tensors = keys.integer("block_count"), len(keys.file.tensors)
    if depth > tensors:
        raise keys.fail("block_count", f"the file has {tensors} tensors")
    return depth
