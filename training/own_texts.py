# SPDX-License-Identifier: Apache-2.0
"""Texts that a published text model writes itself, to train draft heads on.

The model continues its chat template: it asks as a user, or is asked a given question, answers, and goes on
to the next turn. A text is written a token at a time from its first token on, with given tokens in place of
the model's own where there are some, so texts of one batch need no padding. On a GPU the step is one CUDA
graph.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from training.eagle import rotate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # dense text models, all of whose layers are of one kind
GGUF = ".gguf"
QUESTION, ANSWER = "\x00", "\x01"  # stand for the words of user and assistant in the chat template
OWN = -1  # in place of a given token: the model's own
USER_TEMPERATURE = 0.85  # of the user's words: many subjects, and few broken sentences
WARM_UP_STEPS = 3  # before a step is recorded as a CUDA graph


def check_family(model_type: str) -> None:
    """Raise SystemExit for a model type that is not supported."""
    if model_type not in FAMILIES:
        raise SystemExit(f"model_type {model_type}: expected one of {', '.join(FAMILIES)}")


def load_model(checkpoint: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a directory in Hugging Face format or a GGUF file, frozen, in float32.

    SystemExit for a path that is neither, and for a family that is not supported.
    """
    if checkpoint.is_file() and checkpoint.suffix == GGUF:
        where, options = checkpoint.parent, {"gguf_file": checkpoint.name}
    elif (checkpoint / "config.json").is_file():
        where, options = checkpoint, {}
    else:
        raise SystemExit(f"--checkpoint {checkpoint}: expected a directory with config.json, or a GGUF file")
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    check_family(model.config.model_type)
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    return model.requires_grad_(False).eval().to(device), tokenizer


def in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with parameters in bfloat16.

    The frequencies of its RoPE remain in float32.
    """
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16()
    return made


@dataclass(frozen=True)
class Turns:
    """The tokens around the words of user and assistant."""

    start: list[int]  # of a text, up to the user's words
    middle: list[int]  # between the words of the user and of the assistant
    end_of_answer: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Turns:
        """Read them from the chat template.

        Without a template a text begins with the end token, and has no questions. SystemExit for a template
        without words before the user's, or between those of user and assistant.
        """
        stop = tokenizer.eos_token_id
        if not tokenizer.chat_template:
            return cls([stop], [], stop)
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        parts = re.fullmatch(f"(.+?){QUESTION}(.+?){ANSWER}(.*)", text, re.DOTALL)
        if parts is None:
            raise SystemExit(f"chat template: expected text before and after the user's words, got {text!r}")
        ids = [tokenizer(part, add_special_tokens=False).input_ids for part in parts.groups()]
        return cls(ids[0], ids[1], ids[2][0] if ids[2] else stop)


@dataclass(frozen=True)
class Texts:
    """Written texts."""

    ids: Tensor  # [B, L], i64
    answers: Tensor  # [B, L], bool: the next token belongs to an answer, whose end token included

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | Tensor) -> Texts:
        return Texts(self.ids[rows], self.answers[rows])

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        """Put the texts of several batches together."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.answers for part in parts]))


class Writer:
    """Writes batches of texts [batch, length].

    Tokens are sampled from the model's logits: a user's at USER_TEMPERATURE, those of answers at the text's
    own temperature, 0 = greedy.
    graphs: whether a step is recorded as a CUDA graph, on a GPU.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, turns: Turns, batch: int, length: int, graphs: bool = True
    ) -> None:
        if length <= len(turns.start):
            raise SystemExit(f"texts of {length} tokens: the template's first turn has {len(turns.start)}")
        self._model, self._base, self.turns = model, model.get_decoder(), turns
        self.batch, self.length, self.device = batch, length, model.device
        device, dtype, config = model.device, model.dtype, model.config
        new = lambda *shape, kind=torch.int64: torch.zeros(*shape, dtype=kind, device=device)  # noqa: E731
        self._ids, self._given = new(batch, length), new(batch, length + 1)
        self._answers = new(batch, length, kind=torch.bool)
        self._temperatures, self._position = new(batch, 1, kind=torch.float32), new(1)
        self._columns = torch.arange(length, device=device)
        places = torch.zeros(1, device=device)  # of float32, so that the angles are, too
        self._cos, self._sin = (each[0] for each in self._base.rotary_emb(places, self._columns[None]))
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(self._base.layers)
        window = getattr(config, "sliding_window", None) or length
        self._windows = [window if kind == "sliding_attention" else length for kind in kinds]
        self._size = self._base.layers[0].self_attn.head_dim
        shape = batch, config.num_key_value_heads, length, self._size
        self._cache = [(new(*shape, kind=dtype), new(*shape, kind=dtype)) for _ in self._base.layers]
        self._middle = torch.tensor(turns.middle, device=device)
        self._newest = torch.arange(1 - len(turns.middle), 1, device=device)  # offsets of as many tokens
        self._begin = 0  # rows of the cache before it are those of the template in every text
        self._graph = self._record() if graphs and device.type == "cuda" else None

    def _record(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._position.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._position.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _attend(self, index: int, x: Tensor) -> Tensor:
        """Attend from rows x [B, H] of the position to all rows up to it."""
        part, (keys, values) = self._base.layers[index].self_attn, self._cache[index]
        q, k, v = (
            f(x).unflatten(-1, (-1, 1, self._size)) for f in (part.q_proj, part.k_proj, part.v_proj)
        )  # [B, N, 1, D]
        if hasattr(part, "q_norm"):
            q, k = part.q_norm(q), part.k_norm(k)
        cos, sin = self._cos[self._position][None], self._sin[self._position][None]
        keys.index_copy_(2, self._position, rotate(k, cos, sin))
        values.index_copy_(2, self._position, v)
        grouped = rotate(q, cos, sin).view(len(x), keys.shape[1], -1, self._size)
        scores = (grouped @ keys.transpose(-1, -2)).float() * part.scaling
        visible = (self._columns <= self._position) & (self._columns > self._position - self._windows[index])
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype)
        return part.o_proj((weights @ values).flatten(1))

    def _step(self) -> None:
        """Write the token after the position, and go on to it."""
        here = self._position
        x = self._model.get_input_embeddings()(self._ids.index_select(1, here)[:, 0])
        for index, layer in enumerate(self._base.layers):
            x = x + self._attend(index, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = self._model.lm_head(self._base.norm(x)).float()
        answering = self._answers.index_select(1, here)
        temperature = torch.where(answering, self._temperatures, USER_TEMPERATURE)
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-30).log_()
        token = (logits - temperature * noise).argmax(-1, keepdim=True)  # the Gumbel-max trick
        given = self._given.index_select(1, here + 1)
        token = torch.where(given == OWN, token, given)
        self._ids.index_copy_(1, here + 1, token)
        if self.turns.middle:
            newest = self._ids.index_select(1, (here + 1 + self._newest).clamp(min=0))
            asked = (newest == self._middle).all(-1, keepdim=True) & (here + 1 >= len(self.turns.start))
            answering = torch.where(answering, token != self.turns.end_of_answer, asked)
        self._answers.index_copy_(1, here + 1, answering)
        self._position += 1

    @torch.no_grad()
    def write(self, questions: Sequence[list[int] | None], temperatures: Tensor) -> Texts:
        """Write a batch of texts.

        questions: the tokens of each text's first question; None = the model writes it. temperatures [batch]:
        of the answers. A question that leaves no room for an answer is cut.
        """
        start, middle = self.turns.start, self.turns.middle
        given = torch.full((self.batch, self.length + 1), OWN)
        for row, question in enumerate(questions):
            ids = start if question is None else [*start, *question, *middle]
            ids = ids[: self.length]
            given[row, : len(ids)] = torch.tensor(ids)
        self._given.copy_(given)
        self._temperatures.copy_(temperatures[:, None])
        self._ids.copy_(self._given[:, :-1])
        self._answers.fill_(not middle)  # without turns all words are those of an answer
        self._position.fill_(self._begin)
        for _ in range(self._begin, self.length - 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        self._begin = len(start) - 1
        return Texts(self._ids.clone(), self._answers.clone())


def above_zero(text: str) -> float:
    """Parse an argument that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value
