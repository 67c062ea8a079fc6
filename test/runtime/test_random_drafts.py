# SPDX-License-Identifier: Apache-2.0
"""Random models, heads, trees and requests: answers are those of vanilla decoding."""

import pytest

from fixtures.random_drafts import check_random_drafts


@pytest.mark.slow
@pytest.mark.only_on("cpu", "cuda", reason="minutes on the double, which runs other tests of drafts")
@pytest.mark.parametrize("seed", range(6))
def test_answers_of_random_models(tmp_path, seed, runtime_device):
    check_random_drafts(tmp_path, seed, runtime_device)
