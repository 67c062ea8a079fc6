# SPDX-License-Identifier: Apache-2.0
"""Runs one sound through the audio encoder, into embedding rows of the LLM.

Each sound is encoded alone, so its rows depend on that sound only. The bits are the same beside other sounds,
and the prefix cache can use the content of a sound as its key. transformers pads the sounds of a prompt to
the longest one, which changes the rows of the shorter ones: by up to 0.4 where one of them is below 1 s (its
chunk is padded before the convolutions), and often their number, by one (the processor rounds up to a whole
frame). test/parity/test_parity_audio.py compares both with transformers.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.multimodal.audio.config import AudioConfig
from edgellm_ros.multimodal.audio.processor import AudioProcessor
from edgellm_ros.multimodal.sound import Sound


class AudioRunner:
    """Runs the audio encoder, one sound per run, and owns its inputs.

    `max_tokens`: largest number of rows of one sound (the limit of a run).
    """

    def __init__(
        self, executor: EngineExecutor, config: AudioConfig, device: Device, max_tokens: int
    ) -> None:
        self._executor = executor
        self._config = config
        self._device = device
        self._max_tokens = max_tokens
        self._processor = AudioProcessor(config)
        chunks = -(-max_tokens // config.chunk_tokens)
        self._features = device.empty((chunks, config.num_mel_bins, config.chunk_frames), np.float32)
        self._mask = device.empty((max_tokens, max_tokens), np.bool_)
        # Only the last chunk of a sound is padded, so its tokens are the first rows, whatever its length.
        self._token_index = device.empty((max_tokens,), np.int64)
        self._position_index = device.empty((max_tokens,), np.int64)
        device.upload(self._token_index, np.arange(max_tokens))
        device.upload(self._position_index, np.arange(max_tokens) % config.chunk_tokens)

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

    def encode(self, sound: Sound, audio_rows: Tensor) -> None:
        """Encode a sound into audio_rows [tokens, H].

        Sound -> log-mel features -> audio encoder.
        """
        chunks = split_chunks(self._processor.process(sound), self._config.chunk_frames)
        tokens = audio_rows.shape[0]
        features = self._features.view(*chunks.shape)
        self._device.upload(features, chunks)
        mask = self._mask.view(1, 1, tokens, tokens)
        self._device.upload(mask, window_mask(tokens, self._config)[None, None])
        tensors = {
            "input_features": features,
            "token_index": self._token_index.rows(0, tokens),
            "position_index": self._position_index.rows(0, tokens),
            "attention_mask": mask,
            "audio_embeds": audio_rows,
        }
        dims = {"N": chunks.shape[0], "T": chunks.shape[2], "A": tokens}
        self._executor.prepare(0, dims, tensors, self._device.stream)
        self._executor.execute(self._device.stream)
        self._executor.record_repeated(self._device.stream)


def split_chunks(features: np.ndarray, chunk_frames: int) -> np.ndarray:
    """Split features [M, frames] into chunks [N, M, chunk_frames].

    The last chunk is padded with zeros. A single chunk keeps its own length, as in the reference: padding
    would change what the convolutions compute.
    """
    bins, frames = features.shape
    if frames <= chunk_frames:
        return features[None]
    count = -(-frames // chunk_frames)
    padded = np.pad(features, ((0, 0), (0, count * chunk_frames - frames)))
    return np.ascontiguousarray(padded.reshape(bins, count, chunk_frames).transpose(1, 0, 2))


def window_mask(tokens: int, config: AudioConfig) -> np.ndarray:
    """Make the attention mask [tokens, tokens] bool.

    The mask is true inside a window of n_window_infer frames.
    """
    window = config.chunk_tokens * (config.n_window_infer // config.chunk_frames)
    windows = np.arange(tokens) // window
    return windows[:, None] == windows
