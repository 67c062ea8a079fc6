# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter in PyTorch: transformers' block drafter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
)
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
)

NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


class DFlashReference:
    """A base and its drafter, which keeps the rows of all earlier tokens."""

    def __init__(self, checkpoint: Path) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        config = json.loads((checkpoint / "draft/config.json").read_text())
        own = config["dflash_config"]
        self._layers, self._mask = own["target_layer_ids"], own["mask_token_id"]
        self._size = config["block_size"]
        keys = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_types", "block_size",
        )  # fmt: skip
        self._drafter = MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(
                **{key: config[key] for key in keys},
                rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
                target_layer_ids=self._layers,
                mask_token_id=self._mask,
            )
        ).eval()
        tensors = load_file(checkpoint / "draft/model.safetensors")
        self._drafter.load_state_dict({NAMES.get(name, name): each.float() for name, each in tensors.items()})
        self._cache = DFlashCache(config=self._drafter.config)
        self._cache.activate_past_recording()

    def states(self, ids: Tensor) -> Tensor:
        """Return the base's states [1,S,n*H] that the drafter takes."""
        outputs = self.base(ids, output_hidden_states=True).hidden_states
        return torch.cat([outputs[layer + 1] for layer in self._layers], dim=-1)

    def run(self, states: Tensor, newest: int, start: int) -> Tensor:
        """Append rows of context; return the logits [size - 1,V] of a block.

        states [1,S,n*H]; newest: the token after these rows, start: the number of rows before them.
        """
        rows = states.shape[1]
        block = torch.tensor([[newest, *[self._mask] * (self._size - 1)]])
        self._cache.set_previous_accepted_tokens(rows)
        out = self._drafter(
            noise_embeds=self.base.get_input_embeddings()(block),
            context_hidden_states=states,
            position_ids=torch.arange(start, start + rows + self._size)[None],
            past_key_values=self._cache,
        ).last_hidden_state
        self._cache.crop(-self._size)
        return self.base.get_output_embeddings()(out[0, 1:])
