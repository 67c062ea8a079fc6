# SPDX-License-Identifier: Apache-2.0
"""Runs images and videos through the vision tower, into embedding rows of the LLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.image_processor import make_image_processor
from edgellm_ros.multimodal.pixel_buffers import PixelBuffers
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.video_processor import VideoGrid, VideoProcessor
from edgellm_ros.multimodal.vision_config import QwenVisionTower, VisionConfig

MAX_CACHED_GRIDS = 8
CAMERA = 480, 640  # height and width of the image that is run in advance
RowsOf = Callable[[int], tuple[Tensor, list[Tensor]]]  # from a number of tokens to the rows of `encode`


class VisionRunner:
    """Runs the vision tower, and owns its inputs.

    A run is of one image or one group of video frames. The rows of an image depend on that image alone, those
    of a group on its frames and on the size to which the whole video is resized.

    - max_tokens: largest number of rows of one image or video (the limit of a run)
    - fused: executes the tower in the fused kernels, if `uses_fused`; None = the engine encodes all
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: VisionConfig,
        device: Device,
        kernels: Kernels,
        max_tokens: int,
        fused: EngineExecutor | None = None,
    ) -> None:
        self._engine, self._fused = executor, fused
        self.uses_fused = fused is not None
        self._config = config
        self._device = device
        self._max_tokens = max_tokens
        self._processor = make_image_processor(config)
        self._image_levels = self._video_levels = on_device(device, self._processor.levels)
        self.videos: VideoProcessor | None = None  # None = the tower takes no videos
        if isinstance(config, QwenVisionTower) and config.video is not None:
            self.videos = VideoProcessor(config, config.video)
            self._video_levels = on_device(device, self.videos.levels)
        self._pixels = PixelBuffers(device, kernels, config, max_tokens)
        self._grid_inputs: OrderedDict[tuple[int, int], dict[str, Tensor]] = OrderedDict()

    def token_grid(self, image: Image) -> tuple[int, int]:
        """Compute rows and columns of tokens of an image [H, W, 3] uint8 RGB.

        ValueError for another shape or type, for another GPU, and for more than max_tokens tokens.
        """
        self._check(image)
        grid = self._processor.token_grid(*image.shape[:2])
        if grid[0] * grid[1] > self._max_tokens:
            raise ValueError(
                f"an image of {image.shape[1]}x{image.shape[0]} pixels becomes {grid[0] * grid[1]} tokens, "
                f"the engine takes at most {self._max_tokens}"
            )
        return grid

    def video_grid(self, video: Video) -> VideoGrid:
        """Compute the tokens of a video, for a tower that takes videos.

        ValueError for more than max_tokens tokens, and for frames on another GPU.
        """
        assert self.videos is not None
        for frame in video.frames:
            self._check(frame)
        frames, (height, width) = len(video.frames), video.size
        grid = self.videos.grid(frames, height, width)
        if grid.tokens > self._max_tokens:
            raise ValueError(
                f"a video of {frames} frames of {width}x{height} pixels becomes {grid.groups} x "
                f"{grid.group_tokens} tokens, the engine takes at most {self._max_tokens}"
            )
        return grid

    @property
    def _executor(self) -> EngineExecutor:
        return self._fused if self._fused is not None and self.uses_fused else self._engine

    def stop_recording(self) -> None:
        """Run the encoder without graphs from now on."""
        for executor in filter(None, (self._engine, self._fused)):
            executor.stop_recording()

    def interrupt(self) -> None:
        """Let runs fail soon, from any thread, until `resume`."""
        self._engine.interrupt()

    def resume(self) -> None:
        """Undo `interrupt`."""
        self._engine.resume()

    @property
    def camera_tokens(self) -> int:
        """Number of tokens of an image of a camera's usual size."""
        height, width = self._processor.token_grid(*CAMERA)
        return height * width

    @property
    def takes_camera_images(self) -> bool:
        """Whether an image of a camera's usual size has few enough tokens."""
        return self.camera_tokens <= self._max_tokens

    def warm_up(self, rows_of: RowsOf) -> bool:
        """Run and record an image of a camera's usual size.

        So a user's first image is not slow. rows_of: from a number of tokens to the rows that `encode`
        writes. Without effect if the image has too many tokens, and with a plan of TensorRT, of which each
        recorded run takes memory. Returns whether it ran.
        """
        if self._executor.is_plan or not self.takes_camera_images:
            return False
        image = np.zeros((*CAMERA, 3), np.uint8)
        for _ in range(2):  # the second run is recorded
            self.encode(image, *rows_of(self.camera_tokens))
        return True

    def encode(self, image: Image, image_rows: Tensor, deepstack_rows: Sequence[Tensor]) -> None:
        """Encode an image into image_rows [tokens, H] and the deepstack rows."""
        check_image(image)
        sizes = self._processor.resized(*image.shape[:2])
        pixel_values = self._pixels.compute([image], sizes, self._image_levels)
        self._run(pixel_values, self._processor.token_grid(*image.shape[:2]), image_rows, deepstack_rows)

    def encode_group(
        self, video: Video, group: int, image_rows: Tensor, deepstack_rows: Sequence[Tensor]
    ) -> None:
        """Encode a group of a video's frames, counted from 0, as `encode` does an image."""
        assert self.videos is not None
        grid = self.videos.grid(len(video.frames), *video.size)
        frames, sizes = self.videos.group(video, group), self.videos.resized(video)
        pixel_values = self._pixels.compute(frames, sizes, self._video_levels)
        self._run(pixel_values, (grid.rows, grid.columns), image_rows, deepstack_rows)

    def _check(self, image: Image) -> None:
        check_image(image)
        if isinstance(image, DeviceImage):
            image.on(self._device)

    def _run(
        self,
        pixel_values: Tensor,
        token_grid: tuple[int, int],
        image_rows: Tensor,
        deepstack_rows: Sequence[Tensor],
    ) -> None:
        grid_inputs = self._inputs_of_grid(token_grid)
        tensors = {
            "pixel_values": pixel_values,
            **grid_inputs,
            "image_embeds": image_rows,
            **{f"deepstack_embeds_{i}": rows for i, rows in enumerate(deepstack_rows)},
        }
        dims = {self._config.pixels_dim: pixel_values.shape[0], "R": image_rows.shape[0]}
        if "window_index" in grid_inputs:
            dims["W"] = grid_inputs["window_index"].shape[0]
        self._executor.prepare(0, dims, tensors, self._device.stream)
        self._executor.execute(self._device.stream)
        self._executor.record_repeated(self._device.stream)  # the frames of a camera all have the same shape

    def _inputs_of_grid(self, token_grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the inputs that depend on the grid alone, cached on the device.

        A camera always has the same grid.
        """
        if token_grid in self._grid_inputs:
            self._grid_inputs.move_to_end(token_grid)
            return self._grid_inputs[token_grid]
        arrays = self._processor.grid_inputs(token_grid)
        tensors = {name: on_device(self._device, array) for name, array in arrays.items()}
        self._grid_inputs[token_grid] = tensors
        if len(self._grid_inputs) > MAX_CACHED_GRIDS:
            self._grid_inputs.popitem(last=False)
        return tensors
