# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.perplexity` against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks import perplexity  # noqa: E402
from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.cli.quantization.perplexity import begin_of_sequence  # noqa: E402
from edgellm_ros.runtime.text.tokenizer import Tokenizer  # noqa: E402
from fixtures.decoder_checkpoint import write_decoder_checkpoint  # noqa: E402

SIZE, CHUNKS = 24, 3


@torch.no_grad()
def test_it_is_that_of_transformers(tmp_path, capsys):
    checkpoint, engine = write_decoder_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "engine"
    begin = "<|im_start|>"
    (checkpoint / "special_tokens_map.json").write_text(json.dumps({"bos_token": begin}))
    export(checkpoint, engine)
    export(checkpoint, tmp_path / "int4", quantize="int4", group_size=32)
    text = tmp_path / "text"
    text.write_text("go to the red box behind the table and wait there, then turn to the door. " * 8)
    tokenizer = Tokenizer(engine / "tokenizer.json")
    ids = torch.tensor(tokenizer.encode(text.read_text())[: SIZE * CHUNKS]).reshape(CHUNKS, SIZE)
    given = ids.clone()
    given[:, 0] = tokenizer.encode_prompt(begin)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = model(given).logits[:, SIZE // 2 - 1 : -1].log_softmax(-1)
    loss = -expected.gather(-1, ids[:, SIZE // 2 :, None]).mean()
    options = ["--text", str(text), "--chunk", str(SIZE), "--chunks", str(CHUNKS)]
    found = perplexity.main(["--engines", f"{engine},{tmp_path / 'int4'}", *options])
    np.testing.assert_allclose(found["perplexity"][str(engine)], loss.exp(), rtol=1e-4)
    assert found["kl_divergence"][str(engine)] == 0 < found["kl_divergence"][str(tmp_path / "int4")] < 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["predictions"] == CHUNKS * SIZE // 2


def test_the_beginning_of_sequence_is_one_special_token(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    (checkpoint / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    export(checkpoint, tmp_path / "engine")
    tokens = json.loads((tmp_path / "engine" / "tokenizer.json").read_text())["added_tokens"]
    ids = {each["content"]: each["id"] for each in tokens}
    assert begin_of_sequence(tmp_path / "engine") == ids["<|im_start|>"]


def test_a_text_that_is_too_short_is_refused(tmp_path, capsys):
    engine = tmp_path / "engine"
    export(write_decoder_checkpoint(tmp_path / "checkpoint", "llama"), engine)
    (tmp_path / "text").write_text("go")
    with pytest.raises(SystemExit):
        perplexity.main(["--engines", str(engine), "--text", str(tmp_path / "text"), "--chunk", "24"])
    assert "--chunks must be from 1 to 0, as the text has " in capsys.readouterr().err
