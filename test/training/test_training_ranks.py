# SPDX-License-Identifier: Apache-2.0
"""Training in several processes, on the CPU through gloo."""

from __future__ import annotations

import pytest

from fixtures.training_command import REPOSITORY, run_python

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

from tokenizers import Tokenizer  # noqa: E402

from training.checkpoint import load_expert  # noqa: E402
from training.ranks import Ranks  # noqa: E402

ARENA = REPOSITORY / "models/arena"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_two_ranks_learn_what_one_learns_from_both_halves(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys, torch
from training.ranks import Ranks

ranks = Ranks.here()
ranks.connect()
torch.manual_seed(ranks.rank)
model = torch.nn.Linear(3, 2)
ranks.share(model)
x = torch.arange(24.0).reshape(8, 3).sin()
model(x[4 * ranks.rank :][:4]).square().mean().backward()
ranks.average(model.parameters())
learned = [p.grad for p in model.parameters()]
model.zero_grad()
model(x).square().mean().backward()
for wanted, got in zip(model.parameters(), learned):
    torch.testing.assert_close(got, wanted.grad)
assert ranks.agree(f"rank {ranks.rank}") == "rank 0"
sys.stdout.write(f"same {ranks.seed(7)}\\n")  # at once: print would write the end of the line by itself
ranks.disconnect()
"""
    )
    printed = run_python(*TORCHRUN, str(program))
    assert sorted(printed.split("\n")) == ["", "same 448", "same 449"]


def test_ranks_of_several_machines_are_refused(monkeypatch):
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="expected at most 64 processes on one machine, got 16"):
        Ranks.here()


def test_the_command_writes_one_checkpoint(tmp_path):
    """With a few steps on few samples, in two processes."""
    options = "--minutes 0.005 --batch 2 --first 32 --capacity 64 --clips 64 --workers 2 --eval-scenes 2"
    options += " --corpus 60"
    where = ["--init", str(ARENA), "--out", str(tmp_path)]
    printed = run_python(*TORCHRUN, "-m", "training.train", *where, *options.split())
    assert "steps of 2 x 2" in printed
    assert printed.count("written to") == 1
    assert "spoken: right colour and shape named" in printed
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    thinker, report = Thinker.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(parameter.isfinite().all() for parameter in thinker.parameters())
    assert load_expert(tmp_path).dims == load_expert(ARENA).dims
    old, new = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (ARENA, tmp_path))
    assert new.get_vocab() == old.get_vocab()
