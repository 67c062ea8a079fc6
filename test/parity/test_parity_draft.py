# SPDX-License-Identifier: Apache-2.0
"""Draft heads of every layout against EAGLE-3's arithmetic in PyTorch.

A prompt runs, and then levels of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from draft_graph import Draft  # noqa: E402
from eagle_reference import EagleReference  # noqa: E402
from engine_graphs import Graph  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from fixtures.changed_json import change  # noqa: E402
from fixtures.decoder_checkpoint import write_decoder_checkpoint  # noqa: E402
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint  # noqa: E402
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint  # noqa: E402
from fixtures.random_head import RENAMED, base_config, write_random_head  # noqa: E402

TOLERANCE = 1e-4
PROMPT, CHILDREN = 11, 3
LIMITS = {
    "max_input_len": 48,
    "max_kv_cache_capacity": 64,
    "max_draft_tree_size": 16,
    "max_verify_tree_size": 16,
}
ALL_BIASES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEADS: dict[str, dict[str, Any]] = {
    **{f"layout {name}": {"layout": name} for name in RENAMED},
    "speculators, norm before residual": {"layout": "speculators", "norm_before_residual": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norms of states, state before the last norm": {"fc_norm": True},
    "output norm of SpecForge": {"norm_output": True},
    "norm of all states": {"input_norm": True, "fc_bias": True},
    "norms of heads": {"head_norms": True, "rope_theta": 1e6, "rms_norm_eps": 0.01},
    "biases": {"biases": ALL_BIASES, "attention_bias": True},
    "three layers": {"layers": 3, "layout": "layers0"},
    "two layers of midlayer": {"layers": 2, "layout": "midlayer0", "norm_before_residual": True},
    "wrong head_dim": {"changed": {"head_dim": 80}},
    "no head_dim": {"changed": {"head_dim": None}},
    "RoPE of transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "the base's LM head": {"vocabulary": None},
    "narrower than its base": {"hidden_size": 40, "embedding": np.ones((302, 40), np.float16)},
}


@dataclass(frozen=True)
class Case:
    """An exported head and its reference."""

    engine: Path
    config: EngineConfig
    reference: EagleReference


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_decoder_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", "llama")


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def case(request, base, tmp_path) -> Case:
    options = dict(request.param)
    changed = options.pop("changed", {})
    head = write_random_head(tmp_path / "head", base_config(base), **options)
    for key, value in changed.items():
        change(head / "config.json", [key], value)
    config = export(base, tmp_path / "engine", draft=head, **LIMITS)
    # The same seed gives the same tensors in EAGLE's layout.
    plain = write_random_head(tmp_path / "plain", base_config(base), **{**options, "layout": "eagle"})
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]  # is its LM head too
    rope = options.get("rope_parameters", {})
    reference = EagleReference(
        plain,
        layers=options.get("layers", 1),
        epsilon=options.get("rms_norm_eps", 1e-5),
        theta=rope.get("rope_theta", options.get("rope_theta", 10000.0)),
        norm_before_residual=options.get("norm_before_residual", False),
        feeds_back_normed_state=bool(options.get("norm_output") and options.get("fc_norm")),
        lm_head=None if "vocabulary" not in options else torch.tensor(table.astype(np.float32)),
    )
    return Case(tmp_path / "engine", config, reference)


def test_a_prompt_and_two_levels_of_a_tree_have_the_reference_s_logits_and_states(case):
    rng, hidden = np.random.default_rng(3), case.config.draft.hidden_size
    nodes = 2 * CHILDREN
    e = rng.standard_normal((PROMPT + nodes, hidden)).astype(np.float32)
    g = np.zeros_like(e)
    g[:PROMPT] = 3 * rng.standard_normal((PROMPT, hidden))
    seen = np.tri(PROMPT + nodes, dtype=bool)
    seen[PROMPT:, PROMPT:] = np.eye(nodes, dtype=bool)
    parents = [0, 0, 2]  # of the nodes of level 2, among those of level 1
    for child, parent in enumerate(parents):
        seen[PROMPT + CHILDREN + child, PROMPT + parent] = True
    positions = np.array([*range(PROMPT), *[PROMPT] * CHILDREN, *[PROMPT + 1] * CHILDREN])
    draft = Draft(case.engine, case.config)

    def check(start: int, stop: int, wanted) -> np.ndarray:
        logits, states = draft.run(
            e[start:stop], g[start:stop], positions[start:stop], seen[start:stop, :stop], start, wanted
        )
        expected_logits, expected_states = case.reference.forward(
            *(torch.tensor(values[:stop]) for values in (e, g, positions)), torch.tensor(seen[:stop, :stop])
        )
        assert expected_logits.std() > 0.1
        np.testing.assert_allclose(logits, expected_logits[start:][wanted], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(states, expected_states[start:], atol=TOLERANCE, rtol=0)
        return states

    states = check(0, PROMPT, [PROMPT - 1])
    level = slice(PROMPT, PROMPT + CHILDREN)
    g[level] = states[-1]
    states = check(PROMPT, PROMPT + CHILDREN, [0, 1, 2])
    g[PROMPT + CHILDREN :] = states[parents]
    check(PROMPT + CHILDREN, PROMPT + nodes, [2, 0])


def test_the_table_of_draft_logits_has_the_tokens_of_d2t(case):
    path = case.engine / "draft" / "d2t.safetensors"
    if case.config.draft.vocab_size == case.config.llm.vocab_size:
        assert not path.exists()
        return
    offsets = load_file(case.reference.directory / "model.safetensors")["d2t"]
    tokens = load_file(path)["token_of_draft_logit"]
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [logit + offset for logit, offset in enumerate(offsets.tolist())]


@pytest.mark.parametrize(
    ("states", "kind"),
    [((1, 2, 3), {"fc_norm": True}), ((0, 1, 2), {"input_norm": True}), ((0, 2, 3), {"fc_bias": True})],
    ids=["fc_norm", "input_norm", "fc_bias"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_vl", "qwen2_5_vl"])
def test_the_base_fuses_the_states_that_transformers_has(tmp_path, family, states, kind):
    write, model_class = BASES[family]
    checkpoint = write(tmp_path / "checkpoint")
    head = write_random_head(
        tmp_path / "head", base_config(checkpoint), layout="speculators", base_states=states, **kind
    )
    options = {"max_lora_rank": 4} if family == "qwen3" else {}  # another layout of tokens in the graph
    config = export(checkpoint, tmp_path / "engine", draft=head, **LIMITS, **options)
    inputs, arguments = base_inputs(config)
    graphs = [Graph(tmp_path / "engine" / "llm" / f"{name}.onnx") for name in ("model", "verify")]
    for name, node in graphs[0].inputs.items():
        if name not in inputs:  # caches, and LoRA inputs of rank 0
            shape = [size if isinstance(size, int) else 0 if ".lora_" in name else 1 for size in node.shape]
            inputs[name] = np.zeros(shape, np.float32)
    plain, verifying = (graph(**inputs) for graph in graphs)
    np.testing.assert_array_equal(verifying["logits"], plain["logits"])
    for name in plain:
        if name.startswith("present"):
            np.testing.assert_array_equal(verifying[name], plain[name])

    model = model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()
    text = getattr(model.model, "language_model", model.model)
    found: dict[int, torch.Tensor] = {}
    for layer, module in enumerate((*text.layers, text.norm)):

        def keep(_, args, kwargs, layer=layer) -> None:
            found[layer] = (args or (kwargs["hidden_states"],))[0][0]

        module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        text(**arguments, use_cache=False)
        reference = EagleReference(
            write_random_head(tmp_path / "plain", base_config(checkpoint), base_states=None, **kind)
        )
        fused = reference.fuse([found[layer] for layer in states])
    assert fused.std() > 0.1
    np.testing.assert_allclose(verifying["fused_hidden_states"][0], fused, atol=TOLERANCE, rtol=0)


BASES: dict[str, tuple[Any, Any]] = {
    "llama": (lambda path: write_decoder_checkpoint(path, "llama"), transformers.LlamaForCausalLM),
    "qwen3": (lambda path: write_decoder_checkpoint(path, "qwen3"), transformers.Qwen3ForCausalLM),
    "qwen3_vl": (write_qwen3_vl_checkpoint, transformers.Qwen3VLForConditionalGeneration),
    "qwen2_5_vl": (write_qwen2_5_vl_checkpoint, transformers.Qwen2_5_VLForConditionalGeneration),
}


def base_inputs(config: EngineConfig) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Make the same random tokens for a graph and for transformers' text model.

    Return the inputs of the graph and the arguments of the model.
    """
    rng, hidden, tokens = np.random.default_rng(1), config.llm.hidden_size, 9
    embeds = rng.standard_normal((1, tokens, hidden)).astype(np.float32)
    angles = np.arange(tokens)[:, None] * np.array(config.llm.rope.frequencies)
    mask = np.zeros((1, 1, tokens, LIMITS["max_kv_cache_capacity"]), bool)
    mask[..., :tokens] = np.tri(tokens, dtype=bool)
    inputs = {
        "inputs_embeds": embeds,
        "rope_cos": np.cos(angles)[None],
        "rope_sin": np.sin(angles)[None],
        "kv_write_index": np.array([0]),
        "attention_mask": mask,
        "last_token_ids": np.array([[0, tokens - 1]]),
    }
    positions = torch.arange(tokens)[None]
    positions = positions.expand(3, 1, -1) if config.llm.rope.mrope_section else positions
    arguments = {"inputs_embeds": torch.tensor(embeds), "position_ids": positions}
    if config.llm.num_deepstack_features:
        levels = rng.standard_normal((config.llm.num_deepstack_features, 1, tokens, hidden))
        levels[:, :, [0, -1]] = 0  # no images there
        arguments["visual_pos_masks"] = torch.tensor([[0 < i < tokens - 1 for i in range(tokens)]])
        arguments["deepstack_visual_embeds"] = [torch.tensor(level[0, 1:-1]).float() for level in levels]
        inputs |= {f"deepstack_embeds_{i}": level for i, level in enumerate(levels)}
    return inputs, arguments
