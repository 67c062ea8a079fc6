# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 checkpoints as published, with random sizes and switches, against transformers."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qwen_vl_reference import check_answer, load  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402

SIZES = [(48, 64), (131, 33), (20, 150)]


@pytest.fixture(scope="module", params=range(1))
def checkpoint(request, tmp_path_factory):
    return write_whole_qwen3_5_checkpoint(tmp_path_factory.mktemp("qwen3_5") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(transformers.Qwen3_5ForConditionalGeneration, checkpoint)


@pytest.mark.parametrize("sizes", [[], SIZES[:1], SIZES], ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(
    checkpoint, engine, model, sizes, runtime_device
):
    images = tuple(make_image(*size) for size in sizes)
    check_answer(engine, runtime_device, checkpoint, model, images)
