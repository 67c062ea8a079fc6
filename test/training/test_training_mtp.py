# SPDX-License-Identifier: Apache-2.0
"""The command that trains an MTP head for a checkpoint of transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

from transformers import AutoModelForCausalLM, Qwen3NextConfig  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.counted_time import CountedTime  # noqa: E402
from fixtures.published_checkpoint import write_published_checkpoint  # noqa: E402
from fixtures.requests_for_tests import request  # noqa: E402
from training import mtp  # noqa: E402

LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 160}


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny model whose texts repeat themselves, as transformers saves it."""
    return write_published_checkpoint(tmp_path / "checkpoint")


def test_a_trained_head_is_exported_and_drafts_what_the_model_writes(
    checkpoint, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(mtp, "time", CountedTime(0.3))  # a step reads it twice
    options = {"--minutes": 0.6, "--texts": 64, "--tokens": 48, "--batch": 16}
    mtp.main([str(part) for pair in {"--checkpoint": checkpoint, **options}.items() for part in pair])
    assert "are predicted one token early" in capsys.readouterr().out
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config.draft.kind == "mtp"
    chain = SpecDecodeDraftingConfig(1, 3, 4, "mtp", falls_back=False)
    asked = [request(text, max_tokens=80) for text in ("go to the red box", "stop", "turn left")]
    with (
        LLMInferenceRuntime(tmp_path / "engine", "cpu", drafting=None) as plain,
        LLMInferenceRuntime(tmp_path / "engine", "cpu", drafting=chain) as drafting,
    ):
        for one in asked:
            assert drafting.handle_request(one).token_ids == plain.handle_request(one).token_ids
        assert drafting.spec_decode_generation_metrics.tokens_per_verification > 1.3


def test_the_loss_of_the_first_level_compares_with_the_token_after_the_following_one(checkpoint):
    """The wanted logits of row p are those after token p + 1."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.randint(0, 256, (2, 12))
    rows = mtp.Rows(model, ids)
    with torch.no_grad():
        logits, states = model(ids).logits, model.model(ids).last_hidden_state
    torch.testing.assert_close(rows.wanted, logits[:, 1:])
    torch.testing.assert_close(rows.states, states[:, :-1])
    torch.testing.assert_close(rows.following, model.get_input_embeddings()(ids[:, 1:]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--texts", "4"), "--texts 4: expected 8 or more"),
        (("--minutes", "0"), "expected a number above 0, got 0"),
    ],
)
def test_bad_options_are_refused(checkpoint, capsys, arguments, words):
    with pytest.raises(SystemExit):
        mtp.main(["--checkpoint", str(checkpoint), *arguments])
    assert words in capsys.readouterr().err


def test_no_head_is_saved_without_a_step(checkpoint):
    options = ("--texts", "8", "--tokens", "40", "--minutes", "0.0001")
    with pytest.raises(SystemExit, match=r"--minutes 0.0001: writing 8 texts has taken all of them"):
        mtp.main(["--checkpoint", str(checkpoint), *options])
    assert not (checkpoint / mtp.HEAD_FILE).exists()


def test_a_file_cannot_get_a_head(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(SystemExit, match=r"model.gguf: expected a directory, which gets the head"):
        mtp.main(["--checkpoint", str(file)])


def test_a_model_with_layers_of_several_kinds_is_refused():
    model = AutoModelForCausalLM.from_config(
        Qwen3NextConfig(num_hidden_layers=0, vocab_size=8, hidden_size=64)
    )
    with pytest.raises(
        SystemExit, match="model_type qwen3_next: expected one of llama, mistral, qwen2, qwen3"
    ):
        mtp.Head(model)
