# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL checkpoints with random sizes and switches, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qwen_vl_reference import PROMPTS, check_answer, export_beside  # noqa: E402
from random_qwen_vl import write_random_qwen2_5_vl  # noqa: E402
from video_reference import check_videos  # noqa: E402

from fixtures.tiny_checkpoint import write_json  # noqa: E402


def write_older_form(directory: Path) -> None:
    """Give a checkpoint the keys and names of tensors of transformers before 4.52."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    config = text | config
    rope = text["rope_parameters"]
    del config["rope_parameters"]
    config |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    write_json(path, config)
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=range(9))
def exported(request, tmp_path_factory):
    directory = write_random_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl") / "checkpoint", request.param)
    if request.param % 3 == 2:
        write_older_form(directory)
    return export_beside(directory, transformers.Qwen2_5_VLForConditionalGeneration)


@pytest.mark.parametrize("sizes", PROMPTS, ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(exported, sizes, runtime_device):
    check_answer(exported, runtime_device, sizes)


def test_videos_match(exported, runtime_device):
    check_videos(exported, runtime_device)
