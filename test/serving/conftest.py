# SPDX-License-Identifier: Apache-2.0
"""The engine of an ACT, exported once."""

import pytest

from edgellm_ros.builder import export
from fixtures.act_checkpoint import write_act


@pytest.fixture(scope="session")
def act_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served_act")
    export(write_act(folder / "checkpoint"), folder / "engine")
    return folder / "engine"
