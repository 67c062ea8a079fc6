# SPDX-License-Identifier: Apache-2.0
"""The draft head of training: arithmetic, what its steps see, files and command."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import Tokenizer

from fixtures.training_command import REPOSITORY, run_python

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

from safetensors.torch import load_file  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402
from training.checkpoint import load_policy, thinker_config  # noqa: E402
from training.data import SequenceWriter  # noqa: E402
from training.draft import STATE_LAYERS, lesson_of  # noqa: E402
from training.draft_rounds import (  # noqa: E402
    Answered,
    Candidates,
    Drafter,
    Drafting,
    accepted,
    rounds_of,
)
from training.draft_score import tokens_per_verification  # noqa: E402
from training.eagle import (  # noqa: E402
    DraftDims,
    DraftHead,
    DraftRows,
    draft_loss,
    head_config,
    load_head,
    save_head,
)
from training.evaluate import batches, unseen_situations, write_situations  # noqa: E402
from training.part import BASE, Adapters  # noqa: E402
from training.styles import STYLES  # noqa: E402

DIMS = DraftDims(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    vocab_size=50,
    draft_vocab_size=16,
)
BATCH, LENGTH = 2, 12
CHECKPOINT = REPOSITORY / "models" / "arena"
STOPS = ("<|im_end|>", "<|traj_future_start|>")
TOKENIZER = CHECKPOINT / "tokenizer.json"


def llama_config():
    return LlamaConfig(
        hidden_size=DIMS.hidden_size,
        intermediate_size=DIMS.intermediate_size,
        num_attention_heads=DIMS.num_attention_heads,
        num_key_value_heads=DIMS.num_key_value_heads,
        head_dim=DIMS.head_dim,
        rms_norm_eps=DIMS.rms_norm_eps,
        attn_implementation="eager",
    )


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    made = DraftHead(DIMS, torch.randperm(DIMS.vocab_size)[: DIMS.draft_vocab_size].sort().values)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
        parameter.data = parameter.data.half().float()
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def table():
    return torch.randn(DIMS.vocab_size, DIMS.hidden_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def answered(table):
    """Two sequences of random tokens, with random states of a base model."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, DIMS.vocab_size, (BATCH, LENGTH), generator=generator)
    states = torch.randn(BATCH, LENGTH, 3 * DIMS.hidden_size, generator=generator)
    cos, sin = LlamaRotaryEmbedding(llama_config())(states, torch.arange(LENGTH).expand(BATCH, -1))
    rows = DraftRows(table[ids.roll(-1, 1)], states, cos, sin)
    return Answered(ids, torch.tensor([4, 5]), torch.tensor([LENGTH, LENGTH - 2]), rows)


class ReferenceHead:
    """The head made of modules of transformers' Llama.

    The head runs on a whole sequence with a causal mask.
    """

    def __init__(self, head):
        config, weights = llama_config(), head.state_dict()
        self.layer, self.weights = LlamaDecoderLayer(config, 0), weights
        attention = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):  # they take embedding and state
            old = getattr(attention, name)
            setattr(attention, name, torch.nn.Linear(2 * DIMS.hidden_size, old.out_features, bias=False))
        self.layer.self_attn = attention
        part = {k.removeprefix("midlayer."): v for k, v in weights.items() if k.startswith("midlayer.")}
        self.norm = type(self.layer.input_layernorm)(DIMS.hidden_size, DIMS.rms_norm_eps)
        self.hidden_norm = type(self.norm)(DIMS.hidden_size, DIMS.rms_norm_eps)
        self.hidden_norm.weight.data = part.pop("hidden_norm.weight")
        self.norm.weight.data = weights["norm.weight"]
        self.layer.load_state_dict(part)

    def fuse(self, states):
        return states @ self.weights["fc.weight"].T

    def __call__(self, embeddings, states, cos, sin):
        """Return output states [L, H] and logits [L, Vd] of all rows of one sequence."""
        layer, count = self.layer, len(states)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        x = torch.cat((layer.input_layernorm(embeddings), self.hidden_norm(states)), -1)
        attended, _ = layer.self_attn(
            hidden_states=x[None], position_embeddings=(cos[None], sin[None]), attention_mask=mask
        )
        y = states + attended[0]
        out = y + layer.mlp(layer.post_attention_layernorm(y))
        return out, self.norm(out) @ self.weights["lm_head.weight"].T


@torch.no_grad()
def reference_drafts(head, answered, table, sequence, row, tokens):
    """Draft row by row after base-driven rows up to `row`; return each step's logits.

    Each step repeats the whole sequence: the rows of the base, then the row of each token of `tokens`.
    """
    reference, rows = ReferenceHead(head), answered.rows
    embeddings = rows.embeddings[sequence, : row + 1]
    states = reference.fuse(rows.states[sequence, : row + 1])
    found = []
    for step in range(len(tokens) + 1):
        count = row + 1 + step
        out, logits = reference(embeddings, states, rows.cos[sequence, :count], rows.sin[sequence, :count])
        found.append(logits[-1])
        if step < len(tokens):
            embeddings = torch.cat((embeddings, table[tokens[step]][None]))
            states = torch.cat((states, out[-1:]))
    return found


@torch.no_grad()
def test_base_driven_rows_equal_the_reference(head, answered):
    (found,) = head.unroll(answered.rows, torch.zeros(BATCH, dtype=torch.int64), LENGTH, 1)
    reference, rows = ReferenceHead(head), answered.rows
    for i in range(BATCH):
        _, wanted = reference(rows.embeddings[i], reference.fuse(rows.states[i]), rows.cos[i], rows.sin[i])
        torch.testing.assert_close(found[i], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_training_step_sees_what_sequential_drafting_sees(head, answered, table):
    """Both see base-driven rows up to the start, then the head's own rows.

    The head's rows have positions of their own.
    """
    window, steps = 3, 4
    found = head.unroll(answered.rows, answered.prompt - 1, window, steps)
    for i, start in itertools.product(range(BATCH), range(window)):
        row = int(answered.prompt[i]) - 1 + start
        tokens = answered.ids[i, row + 2 : row + 1 + steps].tolist()
        wanted = reference_drafts(head, answered, table, i, row, tokens)
        for step in range(steps):
            torch.testing.assert_close(found[step][i, start], wanted[step], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_drafted_tree_has_the_log_probabilities_of_its_paths(head, answered, table):
    row = answered.prompt - 1
    roots = answered.ids.gather(1, answered.prompt[:, None])[:, 0]
    drafting = Drafting(top_k=3, steps=4, rows=12)
    tree = Drafter(head, table, answered).draft(row, roots, drafting)
    ids = head.token_ids.tolist()
    for i in range(BATCH):
        for entry in range(1, tree.tokens.shape[1]):
            path, node = [], entry
            while node > 0:
                path.insert(0, int(tree.tokens[i, node]))
                node = int(tree.parents[i, node])
            logits = reference_drafts(head, answered, table, i, int(row[i]), path[:-1])
            parts = [x.log_softmax(-1)[ids.index(t)] for x, t in zip(logits, path, strict=True)]
            torch.testing.assert_close(tree.scores[i, entry], sum(parts), atol=1e-4, rtol=1e-4)


def test_the_walk_counts_the_drafted_tokens_that_the_base_says():
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]])
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    scores = torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0, -2.5, -9.0]])
    tree, drafting = Candidates(tokens, scores, parents), Drafting(2, 2, 6)
    for following, count in (([1, 4], 2), ([2, 5], 2), ([2, 6], 1), ([1, 5], 1), ([7, 4], 0)):
        assert accepted(tree, drafting, torch.tensor([following])).tolist() == [count], following


def test_a_draft_that_is_always_right_takes_the_fewest_rounds(head, answered, table, monkeypatch):
    def draft(self, row, roots, drafting):
        index = (row[:, None] + 1 + torch.arange(drafting.steps + 1)).clamp(max=LENGTH - 1)
        chain = torch.arange(drafting.steps + 1).expand(BATCH, -1)
        return Candidates(answered.ids.gather(1, index), -chain.float(), chain - 1)

    monkeypatch.setattr(Drafter, "draft", draft)
    tokens, rounds = rounds_of(head, table, answered, Drafting(1, 3, 4))
    assert tokens == (LENGTH - 4 - 1) + (LENGTH - 2 - 5 - 1)
    assert rounds == 2 + 1  # 7 tokens in rounds of 4 and 3, 4 tokens in one


def test_the_loss_is_zero_for_the_base_models_own_logits_and_skips_invalid_rows():
    wanted = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 4] = False
    steps = [wanted[:, k : k + 4].clone() for k in range(3)]
    for k in range(3):
        steps[k][1, 4 - k :][:1] += torch.arange(16.0)  # row 4, as every step sees it
    assert draft_loss(steps, wanted, valid).abs() < 1e-6
    steps[1][0, 0] += torch.arange(16.0)
    assert draft_loss(steps, wanted, valid) > 0.01


def test_a_head_read_again_gives_equal_logits(head, answered, tmp_path):
    base = thinker_config(Tokenizer.from_file(str(TOKENIZER))).text_config.to_dict()
    save_head(tmp_path, head, head_config(DIMS, base, (2, 4, 5)))
    read, layers = load_head(tmp_path)
    assert layers == (2, 4, 5)
    found, wanted = (h.unroll(answered.rows, answered.prompt - 1, 3, 3) for h in (read, head))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_the_files_are_of_the_published_format(head, tmp_path):
    base = thinker_config(Tokenizer.from_file(str(TOKENIZER))).text_config.to_dict()
    save_head(tmp_path, head, head_config(DIMS, base, (2, 4, 5)))
    weights = load_file(tmp_path / "model.safetensors")
    layer = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    layer += tuple(f"self_attn.{name}_proj" for name in "qkvo")
    layer += tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(weights) == names | {f"midlayer.{name}.weight" for name in layer}
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (4 * 8, 2 * 24)
    assert weights["d2t"].dtype == torch.int64
    target_ids = torch.arange(DIMS.draft_vocab_size) + weights["d2t"]
    assert weights["t2d"].nonzero()[:, 0].tolist() == target_ids.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == DIMS.draft_vocab_size
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # outputs of layers


@pytest.fixture(scope="module")
def arena():
    """The demo checkpoint with its adapters, and four prompts of the test split."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    policy = load_policy(CHECKPOINT, tokenizer)
    adapters = Adapters(policy, CHECKPOINT / "lora", list(STYLES))
    chunk = write_situations(unseen_situations(4), SequenceWriter(tokenizer))
    (batch,) = batches(chunk, None, tokenizer, "cpu")
    return policy.requires_grad_(False), adapters, batch


@torch.no_grad()
def test_an_adapter_has_its_effect_until_another_is_used(arena):
    policy, adapters, batch = arena
    sequences = policy.encode(batch)
    found = {}
    for name in (BASE, "german", "cautious", BASE):
        adapters.use(name)
        hidden, _ = policy.thinker(sequences)
        if name in found:
            assert torch.equal(hidden, found[name])
        found[name] = hidden
    assert not torch.allclose(found[BASE], found["german"], atol=0.1)
    assert not torch.allclose(found["cautious"], found["german"], atol=0.1)


@torch.no_grad()
def test_a_lesson_asks_for_the_base_models_logits_one_row_later(arena):
    """The first start of the window learns the second token of the answer."""
    policy, _, batch = arena
    base = policy.thinker.thinker.config.text_config
    dims = DraftDims(base.hidden_size, 8, 4, 2, 64, 1e-6, base.vocab_size, base.vocab_size)
    head = DraftHead(dims, torch.arange(base.vocab_size))
    lesson = lesson_of(policy, head, STATE_LAYERS, batch, steps=3)
    hidden, _ = policy.thinker(policy.encode(batch))
    logits = policy.thinker.thinker.lm_head(hidden)
    states = policy.thinker.thinker.model.language_model  # states at the input of layer 0 are its embeddings
    for i, (prompt, length) in enumerate(zip(batch["prompt_length"], batch["length"], strict=True)):
        count = int(length) - int(prompt) - 1
        assert lesson.valid[i].tolist() == [True] * count + [False] * (lesson.valid.shape[1] - count)
        wanted = logits[i, int(prompt) : int(length) - 1]
        torch.testing.assert_close(lesson.wanted[i, :count], wanted, atol=1e-4, rtol=1e-4)
        following = batch["ids"][i, int(prompt)].long()
        torch.testing.assert_close(
            lesson.rows.embeddings[i, int(lesson.first[i])], states.embed_tokens(following), atol=0, rtol=0
        )


def test_the_command_writes_a_head(tmp_path):
    """With a few steps on few samples, for the demo checkpoint."""
    options = "--minutes 0.005 --batch 2 --first 32 --capacity 64 --clips 64 --workers 1 --eval-scenes 0"
    options += " --intermediate 16 --steps 3"
    arguments = ["-m", "training.draft", "--checkpoint", str(CHECKPOINT), "--out", str(tmp_path)]
    printed = run_python(*arguments, *options.split())
    assert "situations" in printed
    head, layers = load_head(tmp_path)
    assert layers == STATE_LAYERS
    assert head.dims.intermediate_size == 16
    words = Tokenizer.from_file(str(TOKENIZER))
    ids = set(head.token_ids.tolist())
    for text in (" the", " ich", " carefully", " box"):
        assert words.encode(text, add_special_tokens=False).ids[0] in ids, text
    assert words.token_to_id("<|traj_future_start|>") in ids


def test_the_runtime_yields_the_tokens_of_the_simulation(arena, tmp_path):
    """The draft head is the demo's own.

    The head gets the same states, positions and embeddings in training and in the runtime.
    """
    policy, adapters, batch = arena
    adapters.use(BASE)
    head, layers = load_head(CHECKPOINT / "draft")
    head.requires_grad_(False)
    drafting = Drafting(top_k=1, steps=4, rows=5)
    stops = [Tokenizer.from_file(str(TOKENIZER)).token_to_id(name) for name in STOPS]
    found = tokens_per_verification(policy, head, layers, [dict(batch)], stops, 0.0, [drafting])
    export(CHECKPOINT, tmp_path / "engine", draft=CHECKPOINT / "draft")
    shape = SpecDecodeDraftingConfig(drafting.top_k, drafting.steps, drafting.rows, falls_back=False)
    with LLMInferenceRuntime(tmp_path / "engine", drafting=shape) as runtime:
        for situation, image in zip(unseen_situations(4), batch["image"].numpy(), strict=True):
            runtime.handle_request(
                LLMGenerationRequest(
                    prompt=situation.command.text,
                    images=(image,),
                    history=situation.history,
                    speed=situation.state.speed,
                )
            )
        measured = runtime.spec_decode_generation_metrics.tokens_per_verification
    assert measured == pytest.approx(found[drafting])
    assert measured > 3.5
