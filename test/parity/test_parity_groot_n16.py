# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6 in the engines, against PyTorch with random weights.

`groot_n16_reference.py` tells which packages compute what.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import lerobot_policies  # noqa: E402
from groot_cases import SAMPLES  # noqa: E402
from groot_checks import TOLERANCE, error, inside, previous_chunk, request_of  # noqa: E402
from groot_n16_cases import CASES  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.config.vocabulary_files import tokenizer_of_files  # noqa: E402
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.text.tokenizer import Tokenizer  # noqa: E402
from fixtures.groot_checkpoint import ROBOT  # noqa: E402
from fixtures.groot_n16_checkpoint import ADDED, write_vocabulary  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run the reference of all cases."""
    root = tmp_path_factory.mktemp("groot_n16")
    lerobot_policies.run("0.6.1", "groot_n16_reference.py", str(root))
    return root


@pytest.mark.parametrize("name", list(CASES))
def test_actions_are_those_of_pytorch(folder, tmp_path, name):
    case, expected = CASES[name], np.load(folder / name / "expected.npz")
    policy = export(folder / name / "checkpoint", tmp_path, embodiment=ROBOT).policy
    space, text = policy.action_space, make_policy_head(policy).prompt(case.task, case.state)
    tokens = [
        *policy.prompt_before,
        *Tokenizer(tmp_path / "tokenizer.json").encode(text),
        *policy.prompt_after,
    ]
    assert tokens == expected["tokens"].tolist()
    with LLMInferenceRuntime(tmp_path) as runtime:
        actions = runtime.handle_request(request_of(case)).actions
        assert actions.shape == (SAMPLES, *case.previous.shape)
        assert error(space, actions, expected["actions"][:, : space.horizon]) < TOLERANCE
        assert inside(space, actions).mean() > 0.3  # limits do not hide what was computed
        previous = previous_chunk(case, space)
        found = runtime.handle_request(request_of(case, previous_chunk=previous)).actions
    kept = previous.actions[previous.executed : previous.executed + previous.delay]
    np.testing.assert_allclose(found[:, : previous.delay], [kept] * SAMPLES, atol=1e-5)


def test_a_tokenizer_of_a_vocabulary_is_that_of_transformers(tmp_path):
    write_vocabulary(tmp_path)
    found = tokenizer_of_files(tmp_path)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    parts = [*"pick in.,!?<>\n\t\u00e9\u4e2d's 12_-", "e\u0301", "  ", "<image 1>", *ADDED]
    for _ in range(300):
        text = "".join(rng.choice(parts, size=rng.integers(0, 30)))
        assert found.encode(text, add_special_tokens=False).ids == expected(text).input_ids, repr(text)
