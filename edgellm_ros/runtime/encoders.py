# SPDX-License-Identifier: Apache-2.0
"""Encoders: images, videos and sounds of requests to rows of embeddings."""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import MultimodalMetrics
from edgellm_ros.runtime.request import LLMGenerationRequest

logger = logging.getLogger(__name__)

KNOWN_IMAGES = 1024  # whose samples are kept
Part = tuple[int, Callable[[int, int], None]]  # its tokens; encodes it to rows: the first one, their number
SAMPLED = 16  # rows and columns of an image that tell it from other frames of a camera


@dataclass(frozen=True)
class EncoderRun:
    """An image, a group of video frames, or a sound of a request.

    - stage: "vision" or "audio"; step: how many of the stage come before
    - is_new: whether it is to be encoded; otherwise its rows are there, or are reused
    - compute: encodes it, on any thread
    """

    stage: str
    step: int
    is_new: bool
    compute: Callable[[], None]


class Encoders:
    """The opened encoders of an engine directory.

    Encoder rows of a reused prefix are not computed, nor rows that have been computed before; those of a
    sound that was heard before are copied (`AudioRunner.encode`). One thread at a time computes runs.
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
        for sequence in sequences:
            if sequence.first_row == 0:
                sequence.encoded_rows |= self._ahead
                self._ahead.clear()
            _compute(sequence, self._vision_runs(sequence))

    def encode_audio(self, sequences: list[GenerationSequence]) -> None:
        """Encode sounds, one at a time; cancelled sequences are skipped."""
        for sequence in sequences:
            _compute(sequence, self._audio_runs(sequence))

    def runs(self, sequence: GenerationSequence) -> Iterator[EncoderRun]:
        """Yield what `encode_images` and `encode_audio` encode, in their order."""
        yield from self._vision_runs(sequence)
        yield from self._audio_runs(sequence)

    def interrupt(self) -> None:
        """Let runs fail soon where that is possible, from any thread, until `resume`."""
        for runner in (self._vision, self._audio):
            if runner is not None:
                runner.interrupt()

    def resume(self) -> None:
        """Undo `interrupt`."""
        for runner in (self._vision, self._audio):
            if runner is not None:
                runner.resume()

    def _vision_runs(self, sequence: GenerationSequence) -> Iterator[EncoderRun]:
        """Yield the images of a sequence, then the groups of frames of its videos."""
        if self._vision is None:
            return
        request, tokens = sequence.request, self._config
        images = [
            (height * width, partial(self._encode_image, image))
            for image, (height, width) in zip(request.prompt_images, sequence.image_grids, strict=True)
        ]
        groups = [
            (layout.grid.group_tokens, partial(self._encode_group, video, group))
            for video, layout in zip(request.prompt_videos, sequence.videos, strict=True)
            for group in range(layout.grid.groups)
        ]
        of_both = itertools.chain(
            self._of_kind(sequence, sequence.image_row, tokens.image_token_id, images),
            self._of_kind(sequence, sequence.video_row, tokens.video_token_id, groups),
        )
        for step, (is_new, compute) in enumerate(of_both):
            yield EncoderRun("vision", step, is_new, compute)

    def _audio_runs(self, sequence: GenerationSequence) -> Iterator[EncoderRun]:
        """Yield the sounds of a sequence."""
        if self._audio is None:
            return
        sounds = [
            (tokens, partial(self._encode_sound, sound))
            for sound, tokens in zip(sequence.request.prompt_audio, sequence.audio_tokens, strict=True)
        ]
        of_all = self._of_kind(sequence, sequence.audio_row, self._config.audio_token_id, sounds)
        for step, (is_new, compute) in enumerate(of_all):
            yield EncoderRun("audio", step, is_new, compute)

    def _of_kind(
        self, sequence: GenerationSequence, row: int, placeholder: int | None, parts: Sequence[Part]
    ) -> Iterator[tuple[bool, Callable[[], None]]]:
        """Yield for each part whether it is new, and what encodes it.

        New is what is neither in the reused prefix nor encoded already. row: the first one of the first part.
        """
        first_new = row + sequence.reused(placeholder)
        for tokens, encode in parts:
            start, row = row, row + tokens
            is_new = row > first_new and start not in sequence.encoded_rows
            yield is_new, partial(self._once, sequence, start, partial(encode, start, tokens))

    def _once(self, sequence: GenerationSequence, start: int, encode: Callable[[], None]) -> None:
        """Encode what has the rows from `start` on."""
        encode()
        sequence.encoded_rows.add(start)

    def _encode_image(self, image: Image, start: int, tokens: int) -> None:
        assert self._vision is not None
        image_rows, deepstack_rows = self._embedder.image_rows(start, tokens)
        self._vision.encode(image, image_rows, deepstack_rows)
        self._metrics.total_images += 1
        self._metrics.total_image_tokens += tokens

    def _encode_group(self, video: Video, group: int, start: int, tokens: int) -> None:
        assert self._vision is not None
        image_rows, deepstack_rows = self._embedder.image_rows(start, tokens)
        self._vision.encode_group(video, group, image_rows, deepstack_rows)
        self._metrics.total_frame_groups += 1
        self._metrics.total_image_tokens += tokens

    def _encode_sound(self, sound: Sound, start: int, tokens: int) -> None:
        assert self._audio is not None
        if self._audio.encode(sound, self._embedder.audio_rows(start, tokens)):
            self._metrics.total_sounds += 1
            self._metrics.total_audio_tokens += tokens


def _compute(sequence: GenerationSequence, runs: Iterator[EncoderRun]) -> None:
    """Compute runs of a sequence until it is cancelled."""
    for run in runs:
        if not sequence.report(run.stage, run.step):
            break
        if run.is_new:
            run.compute()
