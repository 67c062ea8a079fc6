# SPDX-License-Identifier: Apache-2.0
"""The thinker's forward pass for training: modules of transformers, batched.

transformers runs one attention call per image and gathers visual tokens by boolean masks, which is right for
mixed inputs and slow for thousands of equal ones. Here all images have the same grid, so every layer is one
call; sounds belong to the first rows. `python -m training.check` compares both on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from training.hearing import AudioForward

MERGED_GRID = (7, 10)
IMAGE_TOKENS = MERGED_GRID[0] * MERGED_GRID[1]
ROPE_DELTA = max(MERGED_GRID) - IMAGE_TOKENS  # position minus index after the image

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sounds:
    """The sounds of a batch's first S rows."""

    embeddings: Tensor  # [S, T, H]
    start: Tensor  # [S], index of the first embedding in its row
    tokens: Tensor  # [S], number of valid embeddings


@dataclass(frozen=True)
class Sequences:
    """A batch of right-padded prompts with answers."""

    ids: Tensor  # [B, L] int64
    image_start: Tensor  # [B], index of the first image token
    image: Tensor  # [B, P/4, H], embeddings of VisionForward
    deepstack: list[Tensor]  # the like, one per level
    sounds: Sounds | None = None  # of the first rows


def mrope_positions(image_start: Tensor, length: int) -> Tensor:
    """Compute Qwen3-Omni's positions [3, B, length] of one image in text.

    Sounds count like text.
    """
    columns = MERGED_GRID[1]
    index = torch.arange(length, device=image_start.device)
    inside = index - image_start[:, None]
    after = inside >= IMAGE_TOKENS
    text = index + after * ROPE_DELTA
    image = (inside >= 0) & ~after
    axes = (torch.zeros_like(inside), inside // columns, inside % columns)
    return torch.stack([torch.where(image, image_start[:, None] + axis, text) for axis in axes])


def patchify(images: Tensor, patch: int = 16, merge: int = 2, temporal: int = 2) -> Tensor:
    """Convert uint8 images [B, H, W, 3] to normalised patches in merge-block order.

    The patches are [B, P, 3 * temporal * patch^2].
    """
    b, h, w, c = images.shape
    x = images.to(torch.float32).mul_(1 / 127.5).sub_(1.0)
    x = x.view(b, h // (merge * patch), merge, patch, w // (merge * patch), merge, patch, c)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)  # B, gh, gw, mh, mw, C, ph, pw
    x = x[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, temporal, -1, -1)
    return x.reshape(b, (h // patch) * (w // patch), c * temporal * patch * patch)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class VisionForward(nn.Module):
    """Batched forward pass of transformers' vision encoder for one image size."""

    def __init__(self, visual: nn.Module, grid: tuple[int, int]):
        super().__init__()
        self.visual = visual
        thw = torch.tensor([[1, *grid]])
        merge = visual.spatial_merge_size
        index, weight = get_vision_interpolation_indices_and_weights(
            thw, visual.num_grid_per_side, mode="bilinear", align_corners=True, spatial_merge_size=merge
        )
        cos, sin = visual.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(thw, merge))
        for name, value in {"index": index, "weight": weight, "cos": cos, "sin": sin}.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Encode uint8 images [B, H, W, 3].

        Returns image embeddings [B, P/4, H], and deepstack embeddings, one per level.
        """
        visual = self.visual
        patches = patchify(images)
        proj = visual.patch_embed.proj
        h = F.linear(patches, proj.weight.flatten(1), proj.bias)
        h = h + (visual.pos_embed(self.index) * self.weight[..., None]).sum(1)
        deepstack = []
        for i, block in enumerate(visual.blocks):
            h = h + self._attend(block.attn, block.norm1(h))
            h = h + block.mlp(block.norm2(h))
            if i in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(i)]
                deepstack.append(self._merge(merger, h))
        return self._merge(visual.merger, h), deepstack

    def _attend(self, attn: nn.Module, x: Tensor) -> Tensor:
        b, p, _ = x.shape
        q, k, v = attn.qkv(x).view(b, p, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v
        )
        return attn.proj(y.transpose(1, 2).reshape(b, p, -1))

    @staticmethod
    def _merge(merger: nn.Module, h: Tensor) -> Tensor:
        b = h.shape[0]
        return merger(h.reshape(-1, h.shape[-1])).view(b, -1, merger.mlp[-1].out_features)


class ThinkerForward(nn.Module):
    """Batched encoders and text model.

    Computes hidden states, and the KV cache that the action expert reads.
    """

    def __init__(self, thinker: nn.Module, grid: tuple[int, int] = (14, 20)):
        super().__init__()
        self.thinker = thinker
        self.vision = VisionForward(thinker.model.visual, grid)
        self.audio = AudioForward(thinker.model.audio_tower)
        text = thinker.config.text_config
        self.sections = text.rope_parameters["mrope_section"]
        inverse = 1.0 / text.rope_parameters["rope_theta"] ** (
            torch.arange(0, text.head_dim, 2, dtype=torch.float32) / text.head_dim
        )
        self.register_buffer("inverse_frequency", inverse, persistent=False)

    def rope(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute interleaved mRoPE rows cos, sin [B, L, D/2] of position_ids [3, B, L]."""
        angle = position_ids[..., None].float() * self.inverse_frequency
        rows = angle[0].clone()
        for axis in (1, 2):
            rows[..., axis : 3 * self.sections[axis] : 3] = angle[
                axis, ..., axis : 3 * self.sections[axis] : 3
            ]
        return rows.cos(), rows.sin()

    def forward(self, sequences: Sequences) -> tuple[Tensor, Cache]:
        """Run the text model.

        Returns final hidden states [B, L, H], and keys and values [B, Hkv, L, D] per layer.
        """
        hidden, cache, _ = self.run(sequences, self.embed(sequences))
        return hidden, cache

    def embed(self, sequences: Sequences) -> Tensor:
        """Compute the text model's inputs [B, L, H] from tokens, image and sounds."""
        h = self.thinker.model.language_model.embed_tokens(sequences.ids)
        h = h.scatter(1, _image_index(sequences), sequences.image.to(h.dtype))
        return h if sequences.sounds is None else with_sounds(h, sequences.sounds)

    def run(
        self, sequences: Sequences, h: Tensor, kept: tuple[int, ...] = ()
    ) -> tuple[Tensor, Cache, list[Tensor]]:
        """Run the text model on its inputs h of `embed`.

        Returns what `forward` does, and the states [B, L, H] at the input of the decoder layers `kept`.
        """
        text, deepstack = self.thinker.model.language_model, sequences.deepstack
        index = _image_index(sequences)
        cos, sin = self.rope(mrope_positions(sequences.image_start, h.shape[1]))
        rope = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        cache, states = DynamicCache(), []
        for i, layer in enumerate(text.layers):
            states.append(h)
            h = layer(h, attention_mask=None, position_embeddings=rope, past_key_values=cache)
            if i < len(deepstack):
                h = h.scatter_add(1, index, deepstack[i].to(h.dtype))
        keys_values = [(layer.keys, layer.values) for layer in cache.layers]
        return text.norm(h), keys_values, [states[i] for i in kept]


def _image_index(sequences: Sequences) -> Tensor:
    """Compute the rows of the image [B, P/4, H] in a batch, for gather and scatter."""
    count, size = sequences.image.shape[1:]
    index = sequences.image_start[:, None] + torch.arange(count, device=sequences.ids.device)
    return index[..., None].expand(-1, -1, size)


def with_sounds(h: Tensor, sounds: Sounds) -> Tensor:
    """Insert the embeddings of the sounds into the first rows of h [B, L, H]."""
    count, most = sounds.embeddings.shape[:2]
    offset = torch.arange(h.shape[1], device=h.device) - sounds.start[:, None]
    inside = (offset >= 0) & (offset < sounds.tokens[:, None])
    offset = offset.clamp(0, most - 1)[..., None].expand(-1, -1, h.shape[-1])
    heard = sounds.embeddings.gather(1, offset).to(h.dtype)
    return torch.cat((torch.where(inside[..., None], heard, h[:count]), h[count:]))
