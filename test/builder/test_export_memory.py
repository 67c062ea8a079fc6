# SPDX-License-Identifier: Apache-2.0
"""An export holds one stored tensor at a time, whatever the checkpoint's size."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fixtures.sparse_checkpoint import write_sparse_checkpoint
from fixtures.tiny_checkpoint import write_json

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 60_000,
    "num_experts": 0,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "rope_theta": 1e6,
}
STORED = 2 * TEXT["vocab_size"] * TEXT["hidden_size"]  # bytes of the embedding table, and of the LM head
# The process's own memory grows by this much at its peak. Maps of files count too. Libraries do not: the
# first export, of few words, imports them.
EXPORT = """
import re, sys
from edgellm_ros.builder import export

def memory(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def run(checkpoint):
    export(checkpoint, sys.argv[3], precision=sys.argv[4], lm_head_input=len(sys.argv) > 5)

run(sys.argv[1])
before = memory("VmRSS")
run(sys.argv[2])
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="the export is the same for every device")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", [["fp16"], ["fp32"], ["fp32", "with an LM head that is an input"]])
def test_an_export_needs_less_than_two_copies_of_the_largest_tensor(tmp_path, options):
    """Whole tensors take 3 (fp16) and 5 (fp32) times the bytes of the stored one.

    The sum is that of the stored tensor and of two converted ones.
    """
    config = {"model_type": "qwen3_omni_moe_thinker", "tie_word_embeddings": False}
    for name, text in (("small", {**TEXT, "vocab_size": 512}), ("large", TEXT)):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", {**config, "text_config": text})
        write_sparse_checkpoint(tmp_path / name, text)
    folders = [tmp_path / name for name in ("small", "large", "engine")]
    command = [sys.executable, "-c", EXPORT, *folders, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * STORED
