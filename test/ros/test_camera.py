# SPDX-License-Identifier: Apache-2.0
"""The camera of the overlay: its projection and where its numbers come from.

The sources are CameraInfo and static transforms.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from sensor_msgs.msg import CameraInfo, RegionOfInterest

from edgellm_arena.ros.camera_messages import camera_transform, to_camera_info
from edgellm_arena.world.camera import CAMERA
from edgellm_ros.ros.node.camera import static_transforms
from edgellm_ros.ros.node.camera.camera import Camera, CameraPose, Intrinsics, camera_of
from edgellm_ros.ros.node.camera.camera_info import check_frame_id, to_intrinsics
from edgellm_ros.ros.node.camera.static_transforms import StaticTransforms
from edgellm_ros.ros.node.settings.camera import CameraParameters

PARAMETERS = CameraParameters(
    "auto", False, CAMERA.focal, CAMERA.focal, CAMERA.width / 2, CAMERA.height / 2,
    CAMERA.z, CAMERA.x, CAMERA.pitch,
)  # fmt: skip
ARENA = camera_of(PARAMETERS)
POINTS = np.random.default_rng(0).uniform([0.8, -0.6], [4.0, 0.6], (50, 2))


def camera(intrinsics: Intrinsics = ARENA.intrinsics, pose: CameraPose = ARENA.pose) -> Camera:
    return Camera(intrinsics, pose)


def info(**changes: object) -> CameraInfo:
    """The calibration of a camera of 640x480 pixels."""
    fields = {
        "width": 640,
        "height": 480,
        "k": [500.0, 0.0, 320.0, 0.0, 510.0, 240.0, 0.0, 0.0, 1.0],
        "r": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        "p": [450.0, 0.0, 310.0, 0.0, 0.0, 460.0, 230.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "distortion_model": "plumb_bob",
        "d": [-0.2, 0.05, 0.001, -0.002, 0.01],
    }
    return CameraInfo(**fields | changes)


def rays(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where floor points are on the plane at distance 1 ahead: right, down.

    The camera is the arena's.
    """
    seen, depth = CAMERA.project_floor(points)
    assert (depth > 0).all()
    x, y = ((seen - [CAMERA.width / 2, CAMERA.height / 2]) / CAMERA.focal).T
    return x, y


class TestProjection:
    def test_is_that_of_the_arenas_camera(self):
        points = np.random.default_rng(0).uniform([0.5, -2.0], [4.0, 2.0], (50, 2))
        np.testing.assert_allclose(camera().project(points), CAMERA.project_floor(points)[0], atol=1e-6)

    def test_points_behind_the_camera_have_no_pixel(self):
        assert np.isnan(camera().project(np.array([[-3.0, 0.0]]))).all()

    def test_of_plumb_bob_and_rational_polynomial_is_that_of_opencvs_formula(self):
        x, y = rays(POINTS)
        r2 = x**2 + y**2
        for model, d in (
            ("plumb_bob", [-0.2, 0.05, 0.001, -0.002, 0.01]),
            ("plumb_bob", [-0.2, 0.05, 0.001, -0.002]),
            ("rational_polynomial", [0.4, 0.05, 0.001, -0.002, 0.01, 0.5, 0.06, 0.02]),
        ):
            k1, k2, p1, p2, k3, k4, k5, k6 = (*d, *[0.0] * (8 - len(d)))
            radial = (1 + k1 * r2 + k2 * r2**2 + k3 * r2**3) / (1 + k4 * r2 + k5 * r2**2 + k6 * r2**3)
            u = 500 * (x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x**2)) + 320
            v = 510 * (y * radial + p1 * (r2 + 2 * y**2) + 2 * p2 * x * y) + 240
            intrinsics = to_intrinsics(info(distortion_model=model, d=d), False, (640, 480))
            np.testing.assert_allclose(camera(intrinsics).project(POINTS), np.stack([u, v], 1), atol=1e-6)

    @pytest.mark.parametrize("d", [[0.0] * 4, [0.05, -0.01, 0.003, -0.001]])
    def test_of_a_fisheye_counts_the_angle(self, d):
        x, y = rays(POINTS)
        r = np.hypot(x, y)
        angle = np.arctan(r)
        bent = angle * (1 + sum(k * angle ** (2 * i + 2) for i, k in enumerate(d))) / r
        intrinsics = to_intrinsics(info(distortion_model="equidistant", d=d), False, (640, 480))
        np.testing.assert_allclose(
            camera(intrinsics).project(POINTS),
            np.stack([500 * x * bent + 320, 510 * y * bent + 240], 1),
            atol=1e-6,
        )

    def test_of_rectified_frames_is_that_of_the_new_camera(self):
        angle = 0.1  # about the optical axis
        turn = [math.cos(angle), -math.sin(angle), 0.0, math.sin(angle), math.cos(angle), 0.0, 0.0, 0.0, 1.0]
        x, y = rays(POINTS)
        right, down = math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y
        intrinsics = to_intrinsics(info(r=turn), True, (640, 480))
        np.testing.assert_allclose(
            camera(intrinsics).project(POINTS), np.stack([450 * right + 310, 460 * down + 230], 1), atol=1e-6
        )

    def test_points_beyond_the_model_of_the_lens_have_no_pixel(self):
        """The polynomial r (1 - 0.3 r^2) is largest at r = 1.05.

        Further out it leads back into the frame.
        """
        intrinsics = to_intrinsics(info(d=[-0.3, 0.0, 0.0, 0.0, 0.0]), False, (640, 480))
        assert intrinsics.limit() == pytest.approx(1 / math.sqrt(0.9), abs=0.01)
        ahead, aside = np.array([[2.0, 0.0]]), np.array([[0.5, 3.0]])
        assert np.isfinite(camera(intrinsics).project(ahead)).all()
        assert np.isnan(camera(intrinsics).project(aside)).all()


class TestCameraInfo:
    def test_frames_of_combined_pixels_of_a_part_of_the_sensor(self):
        roi = RegionOfInterest(x_offset=100, y_offset=40, width=320, height=240)
        intrinsics = to_intrinsics(info(roi=roi, binning_x=2, binning_y=2), False, (160, 120))
        np.testing.assert_allclose(intrinsics.matrix, [[250, 0, 110], [0, 255, 100], [0, 0, 1]])

    def test_without_distortion_there_is_none(self):
        assert len(to_intrinsics(info(d=[0.0] * 5), False, None).distortion) == 0
        assert len(to_intrinsics(info(distortion_model="", d=[]), False, None).distortion) == 0

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"k": [0.0] * 9}, "the camera is not calibrated: k has focal lengths of 0"),
            ({"k": [math.nan] * 9}, "k or p is not finite"),
            ({"d": [math.inf] * 5}, "d is not finite"),
            ({"width": 1280, "height": 720}, "it is for frames of 1280x720 pixels, the frames have 640x480"),
            (
                {"distortion_model": "thin_prism", "d": [0.1] * 12},
                "distortion_model 'thin_prism' with 12 coefficients is not supported, only plumb_bob, "
                "rational_polynomial, equidistant",
            ),
            ({"d": [0.1] * 3}, "distortion_model 'plumb_bob' with 3 coefficients"),
        ],
    )
    def test_of_an_unusable_calibration_says_why(self, changes, reason):
        with pytest.raises(ValueError, match=reason):
            to_intrinsics(info(**changes), False, (640, 480))

    def test_of_another_camera_is_refused(self):
        message = info()
        message.header.frame_id = "left"
        check_frame_id(message, "left")
        check_frame_id(message, "")
        with pytest.raises(ValueError, match="it is of the camera 'left', the frames are of 'right'"):
            check_frame_id(message, "right")


def transform(
    parent: str, child: str, x: float = 0.0, z: float = 0.0,
    qx: float = 0.0, qy: float = 0.0, qz: float = 0.0, qw: float = 1.0,
) -> TransformStamped:  # fmt: skip
    message = TransformStamped(child_frame_id=child)
    message.header.frame_id = parent
    message.transform.translation = Vector3(x=x, z=z)
    message.transform.rotation = Quaternion(x=qx, y=qy, z=qz, w=qw)
    return message


class TestStaticTransforms:
    @pytest.fixture
    def transforms(self) -> StaticTransforms:
        """The arena's camera on a mast beside the base, turned down by its pitch."""
        transforms, half = StaticTransforms(), CAMERA.pitch / 2
        for message in (
            transform("base_footprint", "base_link", z=0.1),
            transform("/base_footprint", "mast", x=CAMERA.x, z=0.3),
            transform("mast", "camera_link", z=CAMERA.z - 0.2, qy=math.sin(half), qw=math.cos(half)),
            # from a frame that looks along x to its optical frame, which looks along z (REP 103)
            transform("camera_link", "camera", qx=-0.5, qy=0.5, qz=-0.5, qw=0.5),
        ):
            transforms.add(message)
        return transforms

    def test_a_chain_gives_the_pose_of_the_camera_in_the_base(self, transforms):
        pose = transforms.find("base_link", "camera")
        np.testing.assert_allclose(pose[:3, :3].T, ARENA.pose.axes, atol=1e-12)
        np.testing.assert_allclose(pose[:3, 3], [CAMERA.x, 0, CAMERA.z], atol=1e-12)

    def test_the_way_back_is_the_inverse(self, transforms):
        there, back = transforms.find("base_link", "camera"), transforms.find("camera", "base_link")
        np.testing.assert_allclose(there @ back, np.eye(4), atol=1e-12)

    def test_a_newer_transform_replaces_the_older_one(self, transforms):
        transforms.add(transform("base_footprint", "mast", x=7.0))
        assert transforms.find("base_link", "camera")[0, 3] == pytest.approx(7.0)

    def test_frames_that_are_not_connected_have_no_pose(self, transforms):
        transforms.add(transform("elsewhere", "lidar"))
        assert transforms.find("base_link", "lidar") is None
        assert transforms.find("base_link", "nothing") is None

    def test_a_loop_ends(self, transforms):
        transforms.add(transform("camera", "base_footprint"))
        assert transforms.find("base_link", "nothing") is None

    def test_frames_beyond_the_limit_are_refused_and_known_ones_still_change(self, transforms, monkeypatch):
        monkeypatch.setattr(static_transforms, "MOST_FRAMES", 4)
        with pytest.raises(ValueError, match="frame 'lidar' is not stored: 4 frames are known"):
            transforms.add(transform("mast", "lidar"))
        assert transforms.find("base_link", "lidar") is None
        transforms.add(transform("base_footprint", "mast", x=7.0))
        assert transforms.find("base_link", "camera")[0, 3] == pytest.approx(7.0)
        transforms.clear()
        transforms.add(transform("mast", "lidar"))
        assert transforms.find("mast", "lidar") is not None

    @pytest.mark.parametrize("names", [("a" * 1001, "lidar"), ("mast", "a" * 1001)])
    def test_a_frame_with_a_name_that_is_too_long_is_refused(self, transforms, names):
        with pytest.raises(ValueError, match=r"\(1001 characters\): the name may have 1000 characters"):
            transforms.add(transform(*names))

    @pytest.mark.parametrize("broken", [{"qw": 0.0}, {"qw": math.nan}, {"qw": 2.0}])
    def test_a_rotation_that_is_none_is_refused(self, transforms, broken):
        with pytest.raises(ValueError, match="'mast' to 'camera_link' is not valid: the quaternion's length"):
            transforms.add(transform("mast", "camera_link", **broken))


def test_the_arena_publishes_its_camera():
    """The centre of the first pixel is (0, 0) in ROS and (0.5, 0.5) in the arena."""
    transforms = StaticTransforms()
    transforms.add(camera_transform(CAMERA))
    pose = transforms.find("base_link", "camera")
    intrinsics = to_intrinsics(to_camera_info(0, CAMERA), False, (CAMERA.width, CAMERA.height))
    pixels = camera(intrinsics, CameraPose(pose[:3, :3].T, pose[:3, 3])).project(POINTS)
    np.testing.assert_allclose(pixels + 0.5, CAMERA.project_floor(POINTS)[0], atol=1e-6)
