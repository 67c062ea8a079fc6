# SPDX-License-Identifier: Apache-2.0
"""Runs one sound through the audio encoder, into embedding rows of the LLM.

Each sound is encoded alone, so its rows depend on that sound only. The bits are the same beside other sounds,
and the prefix cache can use the content of a sound as its key. transformers pads the sounds of a prompt to
the longest one. In Qwen3-Omni this changes the rows of the shorter ones: by up to 0.4 where one of them is
below 1 s (its chunk is padded before the convolutions), and often their number, by one (the processor rounds
up to a whole frame). test/parity/test_parity_audio.py compares both with transformers.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.multimodal.audio.config import AudioConfig
from edgellm_ros.multimodal.audio.encoder_inputs import make_inputs, split_chunks
from edgellm_ros.multimodal.audio.processor import AudioProcessor
from edgellm_ros.multimodal.sound import Sound

AUDIO_EMBEDS = "audio_embeds"
KEPT_SOUNDS = 4  # whose rows are kept: a robot that drives plans again and again from one command
KEPT_TOKENS = 512  # of a sound that is kept
WARM_CHUNKS = 10  # of the longest sound that is run in advance: ten seconds for Qwen3-Omni


class AudioRunner:
    """Runs the audio encoder, one sound per run, and owns its inputs.

    - max_tokens: largest number of rows of one sound (the limit of a run)
    - pads: whether a sound of several chunks is computed as whole chunks, so that runs have few shapes; no
      row attends to those of padding
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: AudioConfig,
        device: Device,
        max_tokens: int,
        pads: bool = False,
    ) -> None:
        self._executor = executor
        self._config = config
        self._device = device
        self._max_tokens = max_tokens
        self._processor = AudioProcessor(config)
        self._inputs = make_inputs(config, device, max_tokens)
        width, dtype = executor.bindings[AUDIO_EMBEDS].shape[1], executor.dtype(AUDIO_EMBEDS)
        assert isinstance(width, int)
        self._whole = device.empty((max_tokens, width), dtype) if pads else None  # rows of whole chunks
        places = KEPT_SOUNDS, min(KEPT_TOKENS, max_tokens), width
        self._kept_rows = device.empty(places, dtype)
        self._kept: list[tuple[Sound, int]] = []  # sounds and their places, the newest last

    def num_tokens(self, sound: Sound) -> int:
        """Compute the number of rows of a sound from its length.

        ValueError if the argument is not a Sound, too short for one frame of features, or needs more than
        max_tokens rows.
        """
        tokens = self._config.num_tokens(self._processor.num_frames(sound))
        if tokens > self._max_tokens:
            raise ValueError(
                f"a sound of {sound.seconds:.2f} s becomes {tokens} tokens, the engine takes at most "
                f"{self._max_tokens} (less than {self._config.max_seconds(self._max_tokens):.2f} s)"
            )
        return tokens

    def stop_recording(self) -> None:
        """Run the encoder without graphs from now on."""
        self._executor.stop_recording()

    def interrupt(self) -> None:
        """Let runs fail soon, from any thread, until `resume`."""
        self._executor.interrupt()

    def resume(self) -> None:
        """Undo `interrupt`."""
        self._executor.resume()

    def encode(self, sound: Sound, audio_rows: Tensor) -> bool:
        """Encode a sound into audio_rows [tokens, H].

        Sound -> log-mel features -> audio encoder. The rows of the last KEPT_SOUNDS sounds are copied; then
        the result is False, as nothing was computed.
        """
        tokens, all_kept = audio_rows.shape[0], self._kept
        for index, (kept, place) in enumerate(all_kept):
            if kept.sample_rate == sound.sample_rate and np.array_equal(kept.samples, sound.samples):
                all_kept.append(all_kept.pop(index))
                self._device.copy(audio_rows, self._place(place, tokens))
                return False
        config = self._config
        features = self._processor.process(sound)
        chunks, frames = split_chunks(features, config.chunk_frames, config.whole_chunks), features.shape[1]
        whole = chunks.shape[0] * config.chunk_tokens
        if self._whole is None or chunks.shape[2] < config.chunk_frames or whole > self._max_tokens:
            self._run(chunks, frames, tokens, audio_rows)
        else:
            self._run(chunks, frames, tokens, self._whole.rows(0, whole))
            self._device.copy(audio_rows, self._whole.rows(0, tokens))
        self._keep(all_kept, sound, audio_rows)
        return True

    def forget(self) -> None:
        """Drop the kept rows, from any thread: after a failure they may be wrong.

        Those of a sound that is being encoded are not kept.
        """
        self._kept = []

    def _keep(self, all_kept: list[tuple[Sound, int]], sound: Sound, audio_rows: Tensor) -> None:
        """Keep the rows of a sound, without effect if the list was dropped meanwhile."""
        tokens = audio_rows.shape[0]
        if tokens > self._kept_rows.shape[1]:
            return
        del all_kept[: max(0, len(all_kept) - KEPT_SOUNDS + 1)]
        used = {place for _, place in all_kept}
        place = next(place for place in range(KEPT_SOUNDS) if place not in used)
        self._device.copy(self._place(place, tokens), audio_rows)
        all_kept.append((Sound(sound.samples.copy(), sound.sample_rate), place))

    def _place(self, place: int, tokens: int) -> Tensor:
        return self._kept_rows.rows(place, place + 1).view(*self._kept_rows.shape[1:]).rows(0, tokens)

    def warm_up(self) -> bool:
        """Run and record sounds of up to WARM_CHUNKS chunks.

        So a user's first sound is not slow. Without effect if sounds are not padded, as then each length has
        a run of its own, and with a plan of TensorRT, of which each recorded run takes memory. Returns
        whether any ran.
        """
        if self._whole is None or self._executor.is_plan:
            return False
        config = self._config
        most = min(WARM_CHUNKS, self._max_tokens // config.chunk_tokens)
        least = 1 if config.whole_chunks else 2  # otherwise a single chunk has the length of its sound
        for count in range(least, most + 1):
            silence = np.zeros((count, config.num_mel_bins, config.chunk_frames), np.float32)
            tokens = count * config.chunk_tokens
            for _ in range(2):  # the second run is recorded
                self._run(silence, count * config.chunk_frames, tokens, self._whole.rows(0, tokens))
            self._executor.keep_graph()
        return most >= least

    def _run(self, chunks: np.ndarray, frames: int, tokens: int, rows: Tensor) -> None:
        """Run the encoder over chunks [N, M, T] of a sound of `frames` frames.

        The first `tokens` of the rows are the sound's, the others are padding.
        """
        tensors, dims = self._inputs.upload(chunks, frames, tokens, rows.shape[0])
        self._executor.prepare(0, dims, {**tensors, AUDIO_EMBEDS: rows}, self._device.stream)
        self._executor.execute(self._device.stream)
        self._executor.record_repeated(self._device.stream)
