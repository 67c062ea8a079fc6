# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE-3 head takes from a text model of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.eagle import DraftHead, DraftRows, Lesson
from training.own_texts import Texts

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")


def state_layers(count: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the layers whose inputs a head takes, of a model with `count` layers.

    chosen: those of the command line; None = the usual ones. SystemExit if the model lacks one of them.
    """
    if chosen is None:
        if count < 4:
            raise SystemExit(f"a model of {count} layers: expected 4 or more")
        return (2, count // 2, count - 3) if count > 6 else (1, 2, count - 1)
    if chosen[-1] >= count:
        raise SystemExit(f"--layers {chosen[-1]}: the model has the layers 0 to {count - 1}")
    return chosen


@torch.no_grad()
def rows_of(model: PreTrainedModel, layers: tuple[int, ...], ids: Tensor) -> tuple[DraftRows, Tensor]:
    """Run the model on texts [B, L].

    Returns a head's rows 0 to L - 2 and the final states [B, L, H], which the LM head takes.
    """
    base = model.get_decoder()
    out = base(ids, use_cache=False, output_hidden_states=True)
    states = torch.cat([out.hidden_states[layer] for layer in layers], -1)[:, :-1]
    places = torch.arange(ids.shape[1] - 1, device=ids.device)
    cos, sin = base.rotary_emb(torch.zeros(1, device=ids.device), places[None])  # in float32
    following = model.get_input_embeddings()(ids[:, 1:])
    expand = lambda x: x.expand(len(ids), -1, -1)  # noqa: E731
    return DraftRows(following, states, expand(cos), expand(sin)), out.last_hidden_state


@torch.no_grad()
def lesson_of(
    model: PreTrainedModel, head: DraftHead, layers: tuple[int, ...], texts: Texts, first: int
) -> Lesson:
    """Make a batch of texts a lesson, from row `first` on."""
    rows, states = rows_of(model, layers, texts.ids)
    logits = model.lm_head(states[:, first + 1 : -1])
    inside = texts.answers[:, first + 1 : -1]
    begin = torch.full((len(texts),), first, device=states.device)
    return Lesson(rows, begin, logits[..., head.token_ids], inside & head.t2d[logits.argmax(-1)])


@torch.no_grad()
def begin_as_model(head: DraftHead, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Give a new head with `fc_norm` weights of the model.

    Where shapes allow it, the head has the model's last norm and LM head, and the layer that takes the last
    of the three states. This state passes `fc` unchanged; the embedding and the other states have no effect
    yet.
    """
    base, hidden, middle = model.get_decoder(), head.dims.hidden_size, head.midlayer
    layer = base.layers[layers[-1]]
    for norm, index in zip(head.fc_norm, layers, strict=True):
        norm.weight.copy_(base.layers[index].input_layernorm.weight)
    head.fc.weight.zero_()[:, 2 * hidden :].copy_(torch.eye(hidden))
    head.norm.weight.copy_(base.norm.weight)
    head.lm_head.weight.copy_(model.lm_head.weight[head.token_ids.to(model.device)])
    middle.hidden_norm.weight.fill_(layer.input_layernorm.weight.square().mean().sqrt())
    middle.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
    if not hasattr(layer.self_attn, "q_norm"):
        for name in ATTENTION:
            part = getattr(middle.self_attn, name).weight
            part.zero_()[:, hidden:].copy_(getattr(layer.self_attn, name).weight)
        middle.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    if head.dims.intermediate_size == model.config.intermediate_size:
        for name in MLP:
            getattr(middle.mlp, name).weight.copy_(getattr(layer.mlp, name).weight)
