# SPDX-License-Identifier: Apache-2.0
"""Records what PEFT answers with adapters on the tests' tiny checkpoint.

The record is for machines without PEFT.

    python test/parity/record_adapters.py            # after test/fixtures/tiny_*.py have changed

Writes test/data/lora_references.json, which test_recorded_adapters.py holds the runtime against.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import peft

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(Path(__file__).parent)]

from adapters import LOGPROBS, MAX_TOKENS, PROMPT, write_adapters  # noqa: E402
from peft_reference import PeftReference  # noqa: E402

from fixtures.tiny_checkpoint import write_tiny_checkpoint  # noqa: E402

FILE = ROOT / "test" / "data" / "lora_references.json"


def record() -> dict:
    """Return every adapter's greedy tokens and the likeliest tokens in their places.

    The likeliest tokens come with their log-probabilities.
    """
    references = {}
    with TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(Path(folder) / "checkpoint")
        for name, directory in write_adapters(Path(folder), checkpoint).items():
            reference = PeftReference(checkpoint, directory)
            answer = reference.answer(reference.prompt(PROMPT), MAX_TOKENS)
            top = answer.logits.double().log_softmax(-1).topk(LOGPROBS)
            references[name] = {
                "token_ids": answer.token_ids,
                "top_ids": top.indices.tolist(),
                "top_logprobs": [[round(value, 6) for value in row] for row in top.values.tolist()],
            }
    return {"peft": peft.__version__, "adapters": references}


if __name__ == "__main__":
    FILE.write_text(json.dumps(record()) + "\n", encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size / 1000:.0f} kB")
