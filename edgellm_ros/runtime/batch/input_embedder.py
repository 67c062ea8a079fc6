# SPDX-License-Identifier: Apache-2.0
"""InputEmbedder: input embeddings from token ids and encoder rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.tensor_file import map_tensor
from edgellm_ros.kernels import Kernels


class InputEmbedder:
    """Owns the embedding `table` [V,H] and the buffer of encoder rows.

    A placeholder for encoder row r has the id V + r, so one look-up serves text, images and sound. Encoder
    rows are numbered over the whole batch. The buffer has max_input_len rows per sequence, and the request
    preparer refuses prompts with more; without an encoder (`encodes`) it has one row, which is never read.
    """

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        device: Device,
        kernels: Kernels,
        dtype: np.dtype,
        encodes: bool = True,
    ) -> None:
        self._device = device
        self._kernels = kernels
        llm, batch, tokens = config.llm, config.builder.max_batch_size, config.builder.max_input_len
        self._pad_id = config.special_tokens.pad_token_id
        video_token_id = config.video.token_id if config.video is not None else None
        self._placeholders = (config.image_token_id, video_token_id, config.audio_token_id)
        self._vocab_size, self._hidden_size = llm.vocab_size, llm.hidden_size
        table = map_tensor(path, "embedding", (llm.vocab_size, llm.hidden_size))
        self.table = device.adopt(table.astype(dtype, copy=False))
        row_shape = (batch * tokens if encodes else 1, llm.hidden_size)
        self._rows = device.zeros(row_shape, dtype)
        self._deepstack_rows = [device.zeros(row_shape, dtype) for _ in range(llm.num_deepstack_features)]
        self._batch, self._dtype = batch, dtype
        self._embeds = device.empty((batch, tokens, llm.hidden_size), dtype)
        self.resize(tokens_per_run=1)
        self._deepstack = [
            device.empty((batch, tokens, llm.hidden_size), dtype) for _ in range(llm.num_deepstack_features)
        ]

    def resize(self, tokens_per_run: int) -> None:
        """Allocate the output of `embed_tokens` for `tokens_per_run` tokens per row."""
        self._token_embeds = self._device.empty((self._batch, tokens_per_run, self._hidden_size), self._dtype)

    def image_rows(self, start: int, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return the output tensors for the vision engine.

        Rows [count, H] of the input, and of each deepstack feature.
        """
        stop = start + count
        return self._rows.rows(start, stop), [rows.rows(start, stop) for rows in self._deepstack_rows]

    def audio_rows(self, start: int, count: int) -> Tensor:
        """Return the output tensor [count, H] for the audio engine.

        The same rows of the deepstack features, which sounds do not have, are zeroed.
        """
        for rows in self._deepstack_rows:
            self._device.fill_zero(rows.rows(start, start + count))
        return self._rows.rows(start, start + count)

    def write_ids(
        self, out: np.ndarray, prompts: Sequence[Sequence[int]], first_rows: Sequence[tuple[int, int, int]]
    ) -> None:
        """Write out [B,S] int64: the ids that `embed_prompts` takes, padded at the end.

        first_rows: the encoder rows of each sequence's first placeholder of an image, of a video and of a
        sound; the rows of further placeholders of the same kind follow.
        """
        out[...] = self._pad_id
        for ids, prompt, starts in zip(out, prompts, first_rows, strict=True):
            ids[: len(prompt)] = prompt
            for placeholder, start in zip(self._placeholders, starts, strict=True):
                places = np.flatnonzero(ids == placeholder)
                ids[places] = self._vocab_size + start + np.arange(len(places))

    def prompt_embeds(self, batch: int, tokens: int) -> Tensor:
        """Return the output of `embed_prompts` [batch,tokens,H]: always the same memory."""
        return self._embeds.view(batch, tokens, self._hidden_size)

    def embed_prompts(self, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return inputs_embeds [B,S,H] and each deepstack feature [B,S,H] of ids [B,S].

        The ids are those of `write_ids`, on the device. The tensors are valid until the next call.
        """
        batch, tokens = token_ids.shape
        embeds = self.prompt_embeds(batch, tokens)
        self._kernels.embed(token_ids, self.table, self._rows, embeds)
        deepstack = [buffer.view(batch, tokens, self._hidden_size) for buffer in self._deepstack]
        for rows, out in zip(self._deepstack_rows, deepstack, strict=True):
            self._kernels.deepstack(token_ids, self._vocab_size, rows, out)
        return embeds, deepstack

    def token_embeds(self, batch: int, tokens: int = 1) -> Tensor:
        """Return the output of `embed_tokens` [batch,tokens,H]: always the same memory."""
        return self._token_embeds.view(batch, tokens, self._hidden_size)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return inputs_embeds [B,S,H] of sampled or drafted tokens [B,S], on the device."""
        embeds = self.token_embeds(*tokens.shape)
        self.embed_into(tokens, embeds)
        return embeds

    def embed_into(self, tokens: Tensor, out: Tensor) -> None:
        """Write the embeddings of text tokens [B,S] to `out` [B,S,H]."""
        self._kernels.embed(tokens, self.table, self._rows, out)
