# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate arm`: episodes as items, and their report."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest

from edgellm_ros.evaluation.results_file import Results
from edgellm_tabletop.episodes.summary import table
from edgellm_tabletop.evaluation.picture import draw
from edgellm_tabletop.evaluation.task import ArmTask, export_policy, summarise_results
from fixtures.act_checkpoint import write_act

SEED = "900001"


def expert_task(**changes) -> ArmTask:
    options = {
        "engine_dir": None,
        "engine": "",
        "device": "cpu",
        "threads": 1,
        "delay": 0.0,
        "blend": 0.2,
        "follow_time": 0.0,
    }
    return ArmTask(**{**options, "workers": 1, **changes})


@pytest.fixture(scope="module")
def outcome() -> dict:
    with expert_task().open() as run:
        return run(SEED)


@pytest.mark.slow
def test_an_item_is_an_episode_of_its_seed(outcome):
    result, measured = outcome["result"], outcome["measured"]
    assert (result["seed"], result["outcome"], result["violations"]) == (900001, "placed", 0)
    assert len(measured["plan_seconds"]) == result["plans"]
    assert not {"plan_seconds", "node_seconds"} & result.keys()


@pytest.mark.slow
def test_results_follow_from_the_options_alone(outcome):
    with expert_task(workers=2).open() as run:
        run("900002")
        assert run(SEED)["result"] == outcome["result"]
    with expert_task(blend=0.0).open() as run:
        assert run(SEED)["result"]["track_sha256"] != outcome["result"]["track_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [[], [0.02, 0.03]])
def test_the_report_has_a_table_and_a_picture(outcome, tmp_path, seconds):
    pytest.importorskip("matplotlib")
    made = {**outcome, "measured": {"plan_seconds": seconds, "node_seconds": [], "workers": 1}}
    options = {"driver": "expert", "delay": 0.0, "blend": 0.2, "follow_time": 0.0}
    results = Results("arm", options, {SEED: made}, {"7": "lost its way"})
    summary = summarise_results(results, [SEED, "7"])
    assert summary["unfinished"] == {"7": "lost its way"}
    assert "placed          1 of 1" in table(summary)
    assert ("frame to chunk" in table(summary)) == bool(seconds)
    draw(tmp_path / "summary.png", results, summary)
    assert min(cv2.imread(str(tmp_path / "summary.png")).shape[:2]) > 300


def test_a_policy_of_another_robot_is_refused_before_anything_moves(tmp_path):
    said: list[str] = []
    checkpoint: Path = write_act(tmp_path / "act")
    with pytest.raises(
        ValueError, match=r"observation\.state: names .*shoulder_pan\.pos.*: expected a list of 3"
    ):
        export_policy(checkpoint, tmp_path / "engine", said.append)
    assert said == [f"exporting {checkpoint} to {tmp_path / 'engine'} ..."]
