# SPDX-License-Identifier: Apache-2.0
"""Adapters as training makes them, in PEFT and in the runtime, on random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from fixtures.draws import only_with_all_draws
from fixtures.training_command import REPOSITORY, run_python

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from edgellm_ros.engine_directory.adapters.peft_adapter import read_adapter  # noqa: E402
from training.checkpoint import new_thinker, save_checkpoint, thinker_config  # noqa: E402
from training.expert import ExpertDims, FlowExpert  # noqa: E402
from training.lora import adapter_rank, load_adapter, put_adapters, save_adapter  # noqa: E402
from training.spec import ACTION_SPACE  # noqa: E402

RANK, ALPHA = 3, 6
TOKENIZER = REPOSITORY / "models" / "arena" / "tokenizer.json"


def thinker():
    torch.manual_seed(0)
    return new_thinker(thinker_config(Tokenizer.from_file(str(TOKENIZER)))).eval()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A thinker, its random adapters in float16's values, and their directory."""
    model = thinker()
    adapters = put_adapters(model, RANK, ALPHA)
    for adapter in adapters.values():
        adapter.b.data.normal_(std=0.3)
        for matrix in (adapter.a, adapter.b):
            matrix.data = matrix.data.half().float()
    directory = tmp_path_factory.mktemp("adapter")
    save_adapter(directory, adapters, RANK, ALPHA)
    return model, adapters, directory


@torch.no_grad()
def test_peft_computes_the_same_logits(adapted):
    model, _, directory = adapted
    ids = torch.randint(0, 600, (2, 30))
    base = thinker()
    before = base(input_ids=ids).logits
    base.config.model_type = "dense"
    theirs = PeftModel.from_pretrained(base, directory)(input_ids=ids).logits
    assert (theirs - before).abs().max() > 0.1
    torch.testing.assert_close(model(input_ids=ids).logits, theirs, atol=1e-4, rtol=0)


def test_the_runtime_reads_the_same_weights(adapted):
    _, adapters, directory = adapted
    name = lambda key: key.replace("model.language_model.", "model.")  # noqa: E731
    targets = {name(key): (a.linear.in_features, a.linear.out_features) for key, a in adapters.items()}
    read = read_adapter(directory, targets, RANK)
    assert read.rank == RANK
    assert set(read.weights) == set(targets)
    for key, adapter in adapters.items():
        a, b = read.weights[name(key)]
        wanted = adapter.scale * adapter.b.detach() @ adapter.a.detach()
        np.testing.assert_allclose((a @ b).T, wanted, atol=1e-5)


@torch.no_grad()
def test_an_adapter_read_again_computes_the_same_logits(adapted):
    model, _, directory = adapted
    ids = torch.randint(0, 600, (1, 20))
    again = thinker()
    assert adapter_rank(directory) == (RANK, ALPHA)
    load_adapter(directory, put_adapters(again, RANK, ALPHA))
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=0, rtol=0)


def test_a_new_adapter_changes_nothing_and_only_it_learns():
    model = thinker()
    ids = torch.randint(0, 600, (1, 20))
    before = model(input_ids=ids).logits
    model.requires_grad_(False)
    put_adapters(model, RANK, ALPHA)
    after = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    after.square().mean().backward()
    learning = {key.rsplit(".", 1)[1] for key, p in model.named_parameters() if p.grad is not None}
    assert learning == {"a", "b"}


@only_with_all_draws
def test_the_command_writes_both_adapters(tmp_path):
    """With a few steps on few samples, from a checkpoint of random weights."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    space = {**ACTION_SPACE, "mean": [0.0, 0.0], "std": [0.6, 0.8]}
    save_checkpoint(tmp_path, thinker(), FlowExpert(ExpertDims()), tokenizer, space)
    options = "--minutes 0.01 --batch 2 --first 32 --capacity 64 --clips 64 --workers 1 --eval-scenes 0"
    options += " --rank 2"
    run_python("-m", "training.adapters", "--checkpoint", str(tmp_path), *options.split())
    for name in ("german", "cautious"):
        config = json.loads((tmp_path / "lora" / name / "adapter_config.json").read_text())
        assert config["r"] == 2
        weights = load_file(tmp_path / "lora" / name / "adapter_model.safetensors")
        assert all(value.dtype == torch.float16 for value in weights.values())
        assert any(value.any() for key, value in weights.items() if "lora_B" in key)
