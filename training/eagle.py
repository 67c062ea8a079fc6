# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 draft head: its arithmetic, its training loss and its files.

Row p of the head takes the base model's state of token p (three layer inputs, fused by `fc`) and the
embedding of token p + 1, and predicts token p + 2. Further tokens are drafted without the base: the next row
takes the head's own state of the row before. Sources: Li et al. 2025, arXiv 2503.01840; format of SpecForge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCABULARY_STEP = 16  # the draft vocabulary is a multiple of this
STEP_WEIGHT = 0.8  # of a step's loss, relative to the step before
HEAD_FILES = CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class DraftDims:
    """Sizes of a draft head."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int  # of the base model
    draft_vocab_size: int
    fc_norm: bool = False  # whether each of the three states has a norm, as in EAGLE-3.1


@dataclass(frozen=True)
class DraftRows:
    """What a head takes from the base model, for every row of a batch of sequences."""

    embeddings: Tensor  # [B, L, H], the base's input at the next position
    states: Tensor  # [B, L, 3H], three layer inputs side by side
    cos: Tensor  # [B, L, D], RoPE of the row's own position
    sin: Tensor  # [B, L, D]


@dataclass(frozen=True)
class Lesson:
    """A batch as a head learns it.

    A lesson has what the head takes from the base model, and the base model's logits.
    """

    rows: DraftRows
    first: Tensor  # [B], the first row that the head learns to draft after
    wanted: Tensor  # [B, W + K - 1, Vd], the base's logits of the rows after `first`
    valid: Tensor  # [B, W + K - 1], whether the base wants a token of the draft vocabulary there


def take(values: Tensor, index: Tensor) -> Tensor:
    """Gather rows index [B, R] of values [B, L, H]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE rows cos, sin [B, R, D] to heads x [B, N, R, D]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]).to(x.dtype)


class RmsNorm(nn.Module):
    """Root-mean-square normalisation, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over embedding and state, concatenated [B, R, 2H]."""

    def __init__(self, dims: DraftDims):
        super().__init__()
        hidden, size = dims.hidden_size, dims.head_dim
        self.groups = dims.num_key_value_heads
        self.size = size
        self.q_proj = nn.Linear(2 * hidden, dims.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, dims.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, dims.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(dims.num_attention_heads * size, hidden, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute queries [B, N, R, D]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values [B, Nkv, R, D]."""
        keys, values = (f(x).unflatten(-1, (-1, self.size)) for f in (self.k_proj, self.v_proj))
        return rotate(keys.transpose(1, 2), cos, sin), values.transpose(1, 2)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Attend to the rows of k and v that mask [B, 1, R, C] shows, and to `own`.

        own: keys and values [B, Nkv, R, D] of which query r sees only row r.
        """
        batch, heads, rows, size = q.shape
        grouped = q.view(batch, self.groups, heads // self.groups, rows, size)
        scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).view(*grouped.shape[:-1], -1).float()
        scores = [scores.masked_fill(~mask[:, None], -torch.inf)]
        own = own or []
        scores += [(grouped * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in own]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1).to(v.dtype)
        seen = weights[..., : k.shape[2]]
        y = (seen.flatten(2, 3) @ v).view_as(grouped)
        for i, (_, value) in enumerate(own):
            y = y + weights[..., k.shape[2] + i, None] * value[:, :, None]
        return self.o_proj(y.flatten(1, 2).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, dims: DraftDims):
        super().__init__()
        norm = lambda: RmsNorm(dims.hidden_size, dims.rms_norm_eps)  # noqa: E731
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn = Attention(dims)
        self.mlp = Mlp(dims.hidden_size, dims.intermediate_size)


class DraftHead(nn.Module):
    """An EAGLE-3 head; its tensors have the names of the published format.

    token_ids: the target ids of the draft vocabulary, ascending.
    """

    def __init__(self, dims: DraftDims, token_ids: Tensor):
        super().__init__()
        self.dims = dims
        if dims.fc_norm:
            self.fc_norm = nn.ModuleList([RmsNorm(dims.hidden_size, dims.rms_norm_eps) for _ in range(3)])
        self.fc = nn.Linear(3 * dims.hidden_size, dims.hidden_size, bias=False)
        self.midlayer = Midlayer(dims)
        self.norm = RmsNorm(dims.hidden_size, dims.rms_norm_eps)
        self.lm_head = nn.Linear(dims.hidden_size, dims.draft_vocab_size, bias=False)
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        known = torch.zeros(dims.vocab_size, dtype=torch.bool)
        known[token_ids] = True
        self.register_buffer("t2d", known)

    @property
    def token_ids(self) -> Tensor:
        """Return the target id of each draft logit [Vd]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: Tensor) -> Tensor:
        """Make one state [B, R, H] of three [B, R, 3H]."""
        if self.dims.fc_norm:
            parts = zip(self.fc_norm, states.chunk(3, -1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], -1)
        return self.fc(states)

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Compute the attention's input [B, R, 2H]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(states)), -1)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Compute the rows' output states [B, R, H], which the next step takes."""
        y = states + attended
        return y + self.midlayer.mlp(self.midlayer.post_attention_layernorm(y))

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits [B, R, Vd] of output states."""
        return self.lm_head(self.norm(states))

    def unroll(self, rows: DraftRows, first: Tensor, window: int, steps: int) -> list[Tensor]:
        """Draft `steps` tokens after each of `window` rows, with the true tokens.

        The rows begin with row first [B]. Step k of start s is row s + k. Like the row that inference
        computes there, it takes the state of step k - 1, and sees the base-driven rows up to s and the rows
        of its own steps. Returns the logits [B, window, Vd] of every step.
        """
        attention = self.midlayer.self_attn
        fused = self.fuse(rows.states)
        x = self.inputs(rows.embeddings, fused)
        keys, values = attention.keys_values(x, rows.cos, rows.sin)
        starts = first[:, None] + torch.arange(window, device=first.device)
        most = fused.shape[1] - 1
        mask = (torch.arange(most + 1, device=first.device) <= starts[..., None])[:, None]
        states = take(fused, starts.clamp(max=most))
        own: list[tuple[Tensor, Tensor]] = []
        result = []
        for step in range(steps):
            index = (starts + step).clamp(max=most)
            cos, sin = take(rows.cos, index), take(rows.sin, index)
            x = self.inputs(take(rows.embeddings, index), states)
            if step > 0:
                own.append(attention.keys_values(x, cos, sin))
            attended = attention(attention.queries(x, cos, sin), keys, values, mask, own)
            states = self.finish(states, attended)
            result.append(self.logits(states))
        return result


def draft_loss(steps: list[Tensor], wanted: Tensor, valid: Tensor) -> Tensor:
    """Compute the mean over steps of the KL divergence from the base model.

    Later steps have less weight.

    steps: logits of `DraftHead.unroll` [B, W, Vd]. wanted: the base's logits of the draft vocabulary
    [B, W + K - 1, Vd], of which step k of start s predicts s + k; valid [B, W + K - 1]: whether to learn it.
    """
    window, total, weights = steps[0].shape[1], wanted.new_zeros(()), 0.0
    target = wanted.float().log_softmax(-1)
    for k, logits in enumerate(steps):
        part = slice(k, k + window)
        found = F.kl_div(logits.float().log_softmax(-1), target[:, part], reduction="none", log_target=True)
        inside = valid[:, part]
        loss = (found.sum(-1) * inside).sum() / inside.sum().clamp(min=1)
        total = total + STEP_WEIGHT**k * loss
        weights += STEP_WEIGHT**k
    return total / weights


def most_frequent(counts: Tensor, most: int | None = None) -> Tensor:
    """Return the ids [Vd] of a draft vocabulary, ascending.

    They are the tokens that occur, at most the `most` most frequent ones. Ids that do not occur fill up the
    last VOCABULARY_STEP. counts [V]: how often each token occurs.
    """
    used = int((counts > 0).sum())
    if most is not None:
        used = min(used, most)
    used = min(-(-used // VOCABULARY_STEP) * VOCABULARY_STEP, len(counts))
    return counts.sort(descending=True, stable=True).indices[:used].sort().values


def head_config(dims: DraftDims, base: dict, state_layers: tuple[int, ...]) -> dict:
    """Return config.json of a head for a base model with text configuration `base`.

    state_layers: decoder layers whose inputs the head takes; the file counts them as outputs of the layer
    before.
    """
    rope = dict(base["rope_parameters"])
    theta = rope.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_size": dims.hidden_size,
        "target_hidden_size": base["hidden_size"],
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": dims.num_attention_heads,
        "num_key_value_heads": dims.num_key_value_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": dims.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope,
        "max_position_embeddings": base["max_position_embeddings"],
        "vocab_size": dims.vocab_size,
        "draft_vocab_size": dims.draft_vocab_size,
        **({"fc_norm": True} if dims.fc_norm else {}),
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in state_layers],
            "use_aux_hidden_state": True,
        },
    }


def save_head(directory: Path, head: DraftHead, config: dict) -> None:
    """Write `config.json` and, in float16, `model.safetensors`.

    An earlier head's tensors remain until the new ones are written.
    """
    weights = {}
    for name, value in head.state_dict().items():
        half = value.to(torch.float16) if value.is_floating_point() else value
        weights[name] = half.detach().contiguous().cpu()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    partial = directory / f"{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(directory / WEIGHTS)


def load_head(directory: Path) -> tuple[DraftHead, tuple[int, ...]]:
    """Read a head of `save_head` in float32, and the layers whose inputs it takes."""
    config = json.loads((directory / CONFIG).read_text())
    dims = DraftDims(**{name: config[name] for name in DraftDims.__dataclass_fields__ if name in config})
    weights = load_file(directory / WEIGHTS)
    head = DraftHead(dims, weights["d2t"] + torch.arange(dims.draft_vocab_size))
    head.load_state_dict(weights)
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return head.float(), tuple(layer + 1 for layer in outputs)
