# SPDX-License-Identifier: Apache-2.0
"""The random test of test/runtime/test_random_drafts.py on more models.

Further seeds give further models: widen SEEDS to look for a rare fault.
"""

import pytest

from fixtures.draws import draws
from fixtures.random_drafts import check_random_drafts

pytestmark = pytest.mark.parity

SEEDS = range(1000, draws(1012, 1020))


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_of_random_models(tmp_path, seed):
    check_random_drafts(tmp_path, seed)
