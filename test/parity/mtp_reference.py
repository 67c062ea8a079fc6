# SPDX-License-Identifier: Apache-2.0
"""MTP heads in PyTorch: transformers' MtpModel, and MiMo's."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MTPReference(Protocol):
    """A base and its head."""

    def states(self, ids: Tensor) -> Tensor:
        """Return the base's states [1,S,H] after its last norm."""
        ...

    def run(self, states: Tensor, following: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head after its earlier rows.

        states [1,S,H], following [1,S]: the tokens after those of the states. Returns logits [1,S,V] and the
        next states [1,S,H].
        """
        ...


class Qwen35Reference:
    """Qwen3.5 and its head by transformers."""

    def __init__(self, checkpoint: Path) -> None:
        config = AutoConfig.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32)
        self._model.config.num_mtp_layers = 1
        self._model.config.mtp_layer_types = ["full_attention"]
        self._head = MtpModel.from_pretrained(self._model)
        self._cache = MtpCache(config=self._model.config.get_mtp_config())

    def states(self, ids: Tensor) -> Tensor:
        return self._model.model(ids).last_hidden_state

    def run(self, states: Tensor, following: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        out = self._head.forward_layer(0, states, positions, self._cache, input_ids=following)
        return self._model.lm_head(out), out


class MiMoReference:
    """MiMo: Qwen2 by transformers, and a head of one of its layers.

    The arithmetic is that of the authors' modeling_mimo.py, MiMoMTPLayers.
    """

    def __init__(self, checkpoint: Path) -> None:
        config = Qwen2Config.from_pretrained(checkpoint)
        config._attn_implementation = "eager"
        tensors = load_file(checkpoint / "model.safetensors")
        self._model = Qwen2ForCausalLM(config)
        base = {name: value.float() for name, value in tensors.items() if "mtp_layers" not in name}
        base.setdefault("lm_head.weight", base["model.embed_tokens.weight"])
        self._model.load_state_dict(base)
        prefix = "model.mtp_layers.0."
        head = {n.removeprefix(prefix): v.float() for n, v in tensors.items() if n.startswith(prefix)}
        self._layer = Qwen2DecoderLayer(config, 0)
        names = self._layer.state_dict()
        self._layer.load_state_dict({name: head[name] for name in names})
        self._norms = {}
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            self._norms[name] = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
            self._norms[name].weight.data = head[f"{name}.weight"]
        self._projection = head["input_proj.weight"]
        self._rows = torch.zeros(1, 0, config.hidden_size), torch.zeros(1, 0, dtype=torch.long)

    def states(self, ids: Tensor) -> Tensor:
        return self._model.model(ids).last_hidden_state

    def run(self, states: Tensor, following: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embeds = self._norms["token_layernorm"](self._model.model.embed_tokens(following))
        new = torch.cat([self._norms["hidden_layernorm"](states), embeds], -1) @ self._projection.T
        rows, all_positions = torch.cat([self._rows[0], new], 1), torch.cat([self._rows[1], positions], 1)
        self._rows = rows, all_positions  # without a cache all rows are computed again
        angles = self._model.model.rotary_emb(rows, all_positions)
        mask = torch.full((rows.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        out = self._layer(rows, attention_mask=mask, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        out = self._norms["final_layernorm"](out)[:, -new.shape[1] :]
        return self._model.lm_head(out), out
