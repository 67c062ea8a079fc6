# SPDX-License-Identifier: Apache-2.0
"""The arm's contract: what it converts, and what it refuses before anything moves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from edgellm_ros.ros.arm.chunk import read_chunk
from edgellm_ros.ros.arm.contract import check_policy, read_contract
from edgellm_ros.ros.chunk_checks import RefusedChunkError

SO101 = Path(__file__).parents[2] / "examples" / "so101_arm.yaml"
DATA = yaml.safe_load(SO101.read_text())
NAMES = [joint["policy"] for joint in DATA["joints"]]


@pytest.fixture
def contract_of(tmp_path):
    """The contract of the SO-101 with changes.

    `contract_of({"joints.0.unit": "radians"})`; a value of None removes the key.
    """

    def make(changes: dict[str, object]):
        data = copy.deepcopy(DATA)
        for path, value in changes.items():
            *parents, key = path.split(".")
            owner = data
            for parent in parents:
                owner = owner[int(parent) if parent.isdigit() else parent]
            if value is None:
                del owner[key]
            else:
                owner[key] = value
        file = tmp_path / "arm.yaml"
        file.write_text(yaml.safe_dump(data))
        return read_contract(file)

    return make


def engine(**changes) -> SimpleNamespace:
    """A policy's configuration, as far as it has names."""
    names = {
        "actions": NAMES, "units": [""] * len(NAMES), "state": NAMES,
        "cameras": ["top", "wrist"], **changes,
    }  # fmt: skip
    return SimpleNamespace(
        action_space=SimpleNamespace(names=names["actions"], units=names["units"]),
        state=SimpleNamespace(names=names["state"]),
        cameras=SimpleNamespace(names=names["cameras"]),
    )


class TestUnits:
    @pytest.mark.parametrize(
        "joint, policy, ros",
        [
            ({"unit": "degrees"}, 90.0, math.pi / 2),
            ({"unit": "degrees", "sign": -1, "offset": 0.5}, 180.0, 0.5 - math.pi),
            ({"unit": "radians", "scale": 2.0}, 0.25, 0.5),
            ({"unit": "metres", "offset": -0.1}, 0.3, 0.2),
            ({"unit": "percent", "end_points": {"policy": [0, 100], "ros": [0.04, 0.0]}}, 75.0, 0.01),
            ({"unit": "percent", "end_points": {"policy": [-100, 100], "ros": [-2.0, 1.0]}}, 0.0, -0.5),
            ({"unit": "degrees", "end_points": {"policy": [10, 20], "ros": [0.0, 1.0]}}, 15.0, 0.5),
        ],
    )
    def test_a_position_converts_to_ros_and_back(self, contract_of, joint, policy, ros):
        contract = contract_of({f"joints.0.{key}": value for key, value in joint.items()})
        values = np.zeros(len(NAMES))
        values[0] = policy
        assert contract.to_ros(values)[0] == pytest.approx(ros)
        assert contract.to_policy(contract.to_ros(values)) == pytest.approx(values)

    def test_columns_of_a_chunk_are_found_by_name(self):
        contract = read_contract(SO101)
        rows = np.arange(12.0).reshape(2, 6)
        chunk = read_chunk(
            contract, 0, request_id="", dt=0.1, horizon=2, names=NAMES[::-1], units=[""] * 6,
            values=rows[:, ::-1].ravel(),
        )  # fmt: skip
        assert contract.to_policy(chunk.targets) == pytest.approx(rows)


class TestRefusedFiles:
    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"joints.0.unit": None}, r"joints\[0\]: missing key 'unit'"),
            ({"joints.0.unit": "steps"}, r"unit must be one of degrees, .* got 'steps'"),
            ({"joints.0.unit": "percent"}, "unit percent needs end_points"),
            ({"joints.5.sign": -1}, "end_points replace sign, scale and offset"),
            ({"joints.5.end_points": {"policy": [0, 0], "ros": [0, 1]}}, "policy must be two different"),
            ({"joints.0.sign": 2}, "sign must be 1 or -1, got 2"),
            ({"joints.0.scale": -1.0}, "scale must be above 0"),
            ({"joints.0.offset": math.nan}, "offset finite"),
            ({"joints.0.limits.position": [1.0, -1.0]}, r"position must be \[lowest, highest\]"),
            ({"joints.0.limits.speed": math.inf}, "speed must be above 0, got inf"),
            ({"joints.0.limits.acceleration": None}, "missing key 'acceleration'"),
            ({"joints.0.limits.speed": 4.0}, r"joint shoulder_pan takes 0\.50 s to stop .* at most 0\.3 s"),
            ({"joints.0.limits.jerk": 50.0}, r"takes 0\.64 s to stop .* raise its jerk"),
            ({"joints.1.ros": "shoulder_pan"}, r"names of joints \(ros\) must be different"),
            ({"joints.1.policy": "shoulder_pan.pos"}, r"names of joints \(policy\) must be different"),
            ({"joints": []}, "at least one joint"),
            ({"joints.0.speed": 1.0}, "unknown key 'speed'"),
            ({"controller.kind": "velocity"}, "kind must be one of joint_trajectory, forward_command"),
            ({"controller.topic": "arm controller"}, "a topic must be a name of ROS"),
            ({"state_topic": ""}, "a topic must be a name of ROS"),
            ({"rate": 1000}, "rate must be from 10 to 500 Hz"),
            ({"rate": "fast"}, "rate: expected float, got str 'fast'"),
        ],
    )
    def test_a_contract_with_a_wrong_value_is_one_line_with_its_key(self, contract_of, changes, reason):
        with pytest.raises(ValueError, match=reason) as refused:
            contract_of(changes)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        "text", ["joints: [", "- 1", "rate: 1\nrate: 2", "!!python/object:os.system {}", ""]
    )
    def test_a_file_that_is_no_contract_is_one_line(self, tmp_path, text):
        (tmp_path / "arm.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"arm\.yaml: ") as refused:
            read_contract(tmp_path / "arm.yaml")
        assert "\n" not in str(refused.value)


class TestFitOfAnEngine:
    def test_an_engine_with_the_same_names_fits(self):
        check_policy(read_contract(SO101), engine())
        check_policy(read_contract(SO101), engine(units=["degrees"] * 5 + ["percent"]))

    def test_an_engine_that_takes_no_state_fits(self):
        policy = engine()
        policy.state = None
        check_policy(read_contract(SO101), policy)

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"actions": NAMES[:5], "units": [""] * 5}, r"actions: .* not there: 'gripper\.pos'"),
            ({"actions": [*NAMES, "base.vel"], "units": [""] * 7}, r"not there: 'base\.vel'"),
            ({"actions": NAMES[:1] * 6}, "do not fit"),
            ({"units": ["radians"] * 6}, r"shoulder_pan\.pos is in 'radians', the contract says degrees"),
            ({"state": ["joint_1"]}, r"state: 'joint_1' do not fit"),
            ({"cameras": ["front"]}, r"cameras of the contract: .* do not fit 'front'"),
        ],
    )
    def test_an_engine_with_other_names_or_units_is_refused(self, changes, reason):
        with pytest.raises(ValueError, match=reason):
            check_policy(read_contract(SO101), engine(**changes))

    def test_an_engine_that_answers_with_text_is_refused(self):
        with pytest.raises(ValueError, match="the engine is no policy"):
            check_policy(read_contract(SO101), None)

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"names": NAMES[:5], "units": [""] * 5}, "wrong_names"),
            ({"names": ["acceleration", "curvature"], "units": ["m/s^2", "1/m"]}, "wrong_names"),
            ({"units": ["radians"] * 6}, "wrong_units"),
            ({"units": [""]}, "wrong_units"),
            ({"values": [math.nan] * 12}, "not_finite"),
            ({"values": [0.0] * 11}, "wrong_size"),
            ({"horizon": 0, "values": []}, "wrong_size"),
            ({"dt": 0.0}, "wrong_dt"),
            ({"dt": math.nan}, "wrong_dt"),
            ({"horizon": 5000, "values": [0.0] * 30000}, "too_long"),
        ],
    )
    def test_a_chunk_that_does_not_fit_is_refused_with_its_reason(self, changes, reason):
        fields = {
            "request_id": "", "dt": 0.1, "horizon": 2, "names": NAMES, "units": [""] * 6,
            "values": [0.0] * 12, **changes,
        }  # fmt: skip
        with pytest.raises(RefusedChunkError) as refused:
            read_chunk(read_contract(SO101), 0, **fields)
        assert refused.value.reason == reason


def test_the_contract_of_the_documentation_is_a_part_of_the_example():
    text = (SO101.parents[1] / "docs" / "arm.md").read_text()
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert {key: shown[key] for key in shown if key not in ("joints", "cameras")}.items() <= DATA.items()
    for key in ("joints", "cameras"):
        assert shown[key]
        assert all(each in DATA[key] for each in shown[key])
