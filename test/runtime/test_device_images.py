# SPDX-License-Identifier: Apache-2.0
"""Images that are on the device already, and images of other libraries."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.multimodal.device_image import DeviceImage, as_image
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.on_device import put
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, assert_same_answer, request

on_a_device = pytest.mark.only_on("cuda", "tensorrt-double", reason="an image needs another memory")
on_a_cpu = pytest.mark.only_on("cpu", reason="these tests need no GPU")


class Foreign:
    """An array of another library on the host."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OnGpu:
    """What an array on a GPU looks like to a machine without one."""

    def __init__(self, shape=(48, 64, 3)):
        self.shape = shape

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": "|u1", "data": (64, False), "version": 3}


@pytest.fixture(scope="module")
def opened(tiny_engine, device):
    with LLMInferenceRuntime(tiny_engine, device) as runtime:
        yield runtime


@on_a_device
class TestOnTheDevice:
    @pytest.mark.parametrize("images", [(IMAGE,), (OTHER_IMAGE, IMAGE)])
    def test_answers_are_those_of_the_same_images_on_the_host(self, opened, device, images):
        expected = opened.handle_request(request(images=images, logprobs=3))
        placed = tuple(put(device, image) for image in images)
        assert_same_answer(opened.handle_request(request(images=placed, logprobs=3)), expected)

    def test_an_image_does_not_pass_through_the_host(self, opened, device, monkeypatch):
        image, copied = put(device, IMAGE), []
        upload, download, to_host = device.upload, device.download, device.copy_to_host
        monkeypatch.setattr(device, "upload", lambda t, s: (copied.append(s.nbytes), upload(t, s)))
        monkeypatch.setattr(device, "download", lambda s: (copied.append(s.size), download(s))[1])
        monkeypatch.setattr(device, "copy_to_host", lambda s: (copied.append(s.size), to_host(s))[1])
        opened.handle_request(request("what do you see?", images=(image,)))
        assert max(copied) < IMAGE.nbytes

    def test_a_changed_image_is_another_image(self, opened, device):
        image = put(device, IMAGE)
        first = opened.handle_request(request(images=(image,), logprobs=3))
        device.upload(image, np.ascontiguousarray(IMAGE[::-1]))
        second = opened.handle_request(request(images=(image,), logprobs=3))
        flipped = np.ascontiguousarray(IMAGE[::-1])
        assert_same_answer(second, opened.handle_request(request(images=(flipped,), logprobs=3)))
        assert first.logprobs != second.logprobs

    def test_an_image_that_is_given_again_is_found_in_the_prefix_cache(self, opened, device):
        image = DeviceImage(put(device, IMAGE))
        first = opened.handle_request(request("look here", images=(image,)))
        second = opened.handle_request(request("look there", images=(image,)))
        other = opened.handle_request(request("look there", images=(put(device, IMAGE),)))
        image_tokens = 12
        assert second.reused_tokens >= first.reused_tokens + image_tokens
        assert other.reused_tokens < second.reused_tokens

    def test_an_image_of_a_conversation(self, opened, device):
        answers = [
            opened.handle_request(
                dataclasses.replace(
                    request("", logprobs=2),
                    messages=(Message("user", (ImagePart(image), TextPart("what is it?"))),),
                )
            )
            for image in (IMAGE, put(device, IMAGE))
        ]
        assert_same_answer(*answers)

    def test_an_image_of_another_type_is_refused_before_any_work(self, opened, device):
        with pytest.raises(ValueError, match=r"an image must be uint8 .* got float32"):
            opened.handle_request(request(images=(put(device, IMAGE, np.float32),)))
        with pytest.raises(ValueError, match=r"in RGB, got uint8 \[48, 64\]"):
            opened.handle_request(request(images=(put(device, IMAGE[:, :, 0]),)))


@on_a_cpu
class TestOnTheHost:
    def test_an_array_of_another_library_is_an_image(self, opened):
        expected = opened.handle_request(request(images=(IMAGE,), logprobs=3))
        one = request(images=(Foreign(IMAGE),), logprobs=3)
        assert np.shares_memory(one.images[0], IMAGE)
        assert_same_answer(opened.handle_request(one), expected)

    def test_an_image_on_a_gpu_is_refused_before_any_work(self, opened):
        with pytest.raises(ValueError, match="the array is on a GPU, and the device is CPU"):
            opened.handle_request(request(images=(OnGpu(),)))

    def test_shapes_of_images_on_a_gpu_are_checked(self):
        check_image(DeviceImage(OnGpu()))
        for shape in ((48, 64), (48, 64, 4)):
            with pytest.raises(ValueError, match=r"uint8 array \[height, width, 3\] in RGB, got uint8"):
                check_image(DeviceImage(OnGpu(shape)))
        with pytest.raises(ValueError, match=r"must not be empty, got shape \[0, 64, 3\]"):
            check_image(DeviceImage(OnGpu((0, 64, 3))))

    def test_each_image_on_a_gpu_has_its_own_key(self):
        array = OnGpu()
        assert as_image(array).key != as_image(array).key
        one = as_image(array)
        assert as_image(one) is one

    def test_what_is_no_array_stays_as_it_is(self):
        assert as_image("camera.png") == "camera.png"
        with pytest.raises(ValueError, match=r"in RGB, got str"):
            check_image(as_image("camera.png"))
