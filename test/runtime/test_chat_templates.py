# SPDX-License-Identifier: Apache-2.0
"""Chat templates of model families render the prompts that transformers rendered."""

from __future__ import annotations

import json

import pytest

from edgellm_ros.engine_directory.chat_template import ChatTemplate
from fixtures.conversations import (
    RECORDED_CASES,
    RECORDED_IMAGE_CASES,
    SPECIAL_TOKENS,
    TEMPLATES,
    TEXT_TEMPLATES,
    VISION_TEMPLATES,
    recorded_cases,
    recorded_prompts,
)

pytestmark = pytest.mark.only_on("cpu", reason="prompts are the same for every device")
CASES = [
    *((template, case) for template in (*TEXT_TEMPLATES, *VISION_TEMPLATES) for case in RECORDED_CASES),
    *((template, case) for template in VISION_TEMPLATES for case in RECORDED_IMAGE_CASES),
]


@pytest.fixture
def template(tmp_path):
    """`template(name)`: this template of the test data, with special tokens beside it."""

    def load(name: str) -> ChatTemplate:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
        path = tmp_path / "chat_template.jinja"
        path.write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
        return ChatTemplate(path)

    return load


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_prompt_is_the_one_that_transformers_rendered(template, name, case):
    messages, variables, continued = recorded_cases(name)[case]
    assert template(name).render(messages, variables, continued) == recorded_prompts(name)[case]
