# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.multimodal.video import Video
from fixtures.reference_inputs import make_image

FRAMES = [make_image(20, 30), make_image(20, 30)]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"frames": []}, "at least one frame, got none"),
        ({"frames": 5}, "frames must be a sequence of images, got 5"),
        ({"frames": [FRAMES[0], FRAMES[1][..., 0]]}, r"frame 1: an image must be .*, got uint8 \[20, 30\]"),
        (
            {"frames": [FRAMES[0], make_image(30, 20)]},
            "one size: frame 0 is 30x20 pixels, frame 1 20x30",
        ),
        ({"timestamps": None}, "needs timestamps or fps"),
        ({"timestamps": [0.0]}, "a timestamp for each frame, got 1 for 2 frames"),
        ({"timestamps": [0.0, 1.0, 2.0]}, "got 3 for 2 frames"),
        ({"timestamps": [1.0, 1.0]}, "increase, got 1 s for frame 0 and 1 s for frame 1"),
        ({"timestamps": [1.5, 1.0]}, "increase, got 1.5 s for frame 0 and 1 s for frame 1"),
        ({"timestamps": [0.0, float("nan")]}, "from 0 to 1e.10 s, got nan for frame 1"),
        ({"timestamps": [0.0, float("inf")]}, "got inf for frame 1"),
        ({"timestamps": [-1.0, 0.0]}, "got -1.0 for frame 0"),
        ({"timestamps": ["0", "1"]}, "got '0' for frame 0"),
        ({"timestamps": "01"}, "timestamps must be a sequence of seconds, got '01'"),
        ({"timestamps": None, "fps": 0}, "fps must be a number from 1e-06 to 1e.06, got 0"),
        ({"timestamps": None, "fps": float("nan")}, "fps must be .*, got nan"),
        ({"timestamps": None, "fps": True}, "fps must be .*, got True"),
        ({"sound": np.zeros(9, np.float32)}, "sound must be a Sound, got ndarray"),
    ],
)
def test_an_invalid_video_is_refused_with_the_value(parameters, message):
    with pytest.raises(ValueError, match=message):
        Video(**{"frames": FRAMES, "timestamps": [0.0, 0.5], **parameters})


def test_a_video_without_timestamps_has_those_of_its_rate():
    video = Video(np.stack(FRAMES * 2), fps=4)
    assert video.timestamps == (0.0, 0.25, 0.5, 0.75)
    assert video.sampled_fps == 4
    assert video.size == (20, 30)


def test_the_rate_of_a_video_with_timestamps_is_their_mean():
    assert Video(FRAMES * 2, [10, 10.5, 12, 13]).sampled_fps == 1.0
    assert Video(FRAMES * 2, [10, 10.5, 12, 13], fps=3).sampled_fps == 3
    assert Video(FRAMES[:1], [7.5]).sampled_fps == 1.0
