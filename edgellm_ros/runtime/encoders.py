# SPDX-License-Identifier: Apache-2.0
"""Encoders: images, videos and sounds of requests to rows of embeddings."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import MultimodalMetrics
from edgellm_ros.runtime.request import LLMGenerationRequest

logger = logging.getLogger(__name__)

KNOWN_IMAGES = 1024  # whose samples are kept
SAMPLED = 16  # rows and columns of an image that tell it from other frames of a camera


class Encoders:
    """The opened encoders of an engine directory.

    Encoder rows of a reused prefix are not computed, nor rows that have been computed before; those of a
    sound that was heard before are copied (`AudioRunner.encode`).
    """

    def __init__(
        self,
        config: EngineConfig,
        vision: VisionRunner | None,
        audio: AudioRunner | None,
        embedder: InputEmbedder,
        metrics: MultimodalMetrics,
    ) -> None:
        self._config = config
        self._vision = vision
        self._audio = audio
        self._embedder = embedder
        self._metrics = metrics
        self._is_warm = False
        self._known: OrderedDict[Hashable, None] = OrderedDict()  # samples of images, the latest last
        self._ahead: set[int] = set()  # first rows of the images of the next batch's first request

    def warm_up(self, device: Device) -> None:
        """Run what a camera and a microphone usually send.

        So a user's first image or sound is not slow. On devices with graphs, which record these runs. The log
        has the time, or why it could not run. A second call does nothing. No batch may run: rows of
        embeddings are overwritten.
        """
        if self._is_warm or not device.has_graphs:
            return
        self._is_warm = True
        start, ran = time.perf_counter(), []
        try:
            if self._vision is not None and self._vision.warm_up(self._rows_of_first):
                ran.append("an image")
            if self._audio is not None and self._audio.warm_up():
                ran.append("sounds")
            device.synchronize()
        except DeviceLostError:
            raise
        except EngineError as error:
            logger.warning("images and sounds are not run in advance: %s", error)
            return
        if ran:
            logger.info("ran %s in advance in %.1f s", " and ".join(ran), time.perf_counter() - start)

    def _rows_of_first(self, tokens: int) -> tuple[Tensor, list[Tensor]]:
        return self._embedder.image_rows(0, tokens)

    def encode_ahead(self, request: LLMGenerationRequest, caches: bool) -> bool:
        """Encode new images of a batch's first request before its prompt is made.

        So the device works while the host renders and tokenizes the prompt. Images that may be in the prefix
        cache (`caches`: there is one) are left to `encode_images`, as are those behind an image that the
        engine refuses. Returns whether there were new images.
        """
        self._ahead.clear()
        if self._vision is None or (request.cancel is not None and request.cancel.is_set()):
            return False
        row = 0
        for image in request.prompt_images:
            try:
                height, width = self._vision.token_grid(image)
            except ValueError:
                break
            start, row = row, row + height * width
            if row > self._config.builder.max_input_len:
                break
            if not caches or self._is_new(image):
                self._encode_image(image, start, height * width)
                self._ahead.add(start)
        return bool(self._ahead)

    def forget_ahead(self) -> None:
        """Drop what `encode_ahead` has encoded: its request is refused."""
        self._ahead.clear()

    def _is_new(self, image: Image) -> bool:
        """Tell whether an image differs from the latest ones, and remember it.

        Compares sizes and some of the pixels, so an image that counts as known may still be new.
        """
        if isinstance(image, DeviceImage):
            sample: Hashable = image.key
        else:
            down, across = (max(1, size // SAMPLED) for size in image.shape[:2])
            sample = image.shape, image[::down, ::across].tobytes()
        is_new = sample not in self._known
        self._known[sample] = None
        self._known.move_to_end(sample)
        if len(self._known) > KNOWN_IMAGES:
            self._known.popitem(last=False)
        return is_new

    def encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Encode images, one at a time, then videos.

        Cancelled sequences are skipped, and so are images that `encode_ahead` has encoded.
        """
        if self._vision is None:
            return
        for sequence in sequences:
            if sequence.first_row == 0:
                sequence.encoded_rows |= self._ahead
                self._ahead.clear()
            reused = sequence.reused(self._config.image_token_id)
            row, first_new = sequence.image_row, sequence.image_row + reused
            images = sequence.request.prompt_images
            for index, (height, width) in enumerate(sequence.image_grids):
                if not sequence.report("vision", index):
                    break
                start, row = row, row + height * width
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
                    self._encode_image(images[index], start, height * width)
            self._encode_videos(sequence, self._vision)

    def _encode_image(self, image: Image, start: int, tokens: int) -> None:
        assert self._vision is not None
        image_rows, deepstack_rows = self._embedder.image_rows(start, tokens)
        self._vision.encode(image, image_rows, deepstack_rows)
        self._metrics.total_images += 1
        self._metrics.total_image_tokens += tokens

    def _encode_videos(self, sequence: GenerationSequence, vision: VisionRunner) -> None:
        """Encode the videos of a sequence, one group of frames at a time."""
        row = sequence.video_row
        first_new = row + sequence.reused(self._config.video_token_id)
        step = len(sequence.image_grids)
        for video, layout in zip(sequence.request.prompt_videos, sequence.videos, strict=True):
            tokens = layout.grid.group_tokens
            for group in range(layout.grid.groups):
                if not sequence.report("vision", step):
                    return
                start, row, step = row, row + tokens, step + 1
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
                    image_rows, deepstack_rows = self._embedder.image_rows(start, tokens)
                    vision.encode_group(video, group, image_rows, deepstack_rows)
                    self._metrics.total_frame_groups += 1
                    self._metrics.total_image_tokens += tokens

    def encode_audio(self, sequences: list[GenerationSequence]) -> None:
        """Encode sounds, one at a time; cancelled sequences are skipped."""
        if self._audio is None:
            return
        for sequence in sequences:
            reused = sequence.reused(self._config.audio_token_id)
            row, first_new = sequence.audio_row, sequence.audio_row + reused
            sounds = sequence.request.prompt_audio
            for index, tokens in enumerate(sequence.audio_tokens):
                if not sequence.report("audio", index):
                    break
                start, row = row, row + tokens
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
                    if self._audio.encode(sounds[index], self._embedder.audio_rows(start, tokens)):
                        self._metrics.total_sounds += 1
                        self._metrics.total_audio_tokens += tokens
