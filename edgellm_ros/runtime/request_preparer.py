# SPDX-License-Identifier: Apache-2.0
"""RequestPreparer: checks requests and makes their prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.trajectory_history import check_history, history_speed, history_tokens
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio_runner import AudioRunner
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.grammar import Grammars
from edgellm_ros.runtime.lora import LoraAdapters
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.rope import get_rope_index, plain_rope_index
from edgellm_ros.runtime.prompt.text_stream import TextStream
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.prompt.video_layout import VideoLayout, lay_out_video
from edgellm_ros.runtime.request import LLMGenerationRequest, check_speed


class RequestPreparer:
    """Checks requests against the engine's parts and limits, and makes their prompts."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        loras: LoraAdapters,
        vision: VisionRunner | None,
        audio: AudioRunner | None,
        action: ActionRunner | None,
        grammars: Grammars,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._loras = loras
        self._vision = vision
        self._audio = audio
        self._action = action
        self._grammars = grammars

    def prepare(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[GenerationSequence]:
        """Make the sequences of a batch.

        `noise_seed` is for requests without one. ValueError names the first invalid request; then the whole
        batch is refused, and nothing has been computed.
        """
        limit = self._config.builder.max_batch_size
        if not 1 <= len(requests) <= limit:
            raise ValueError(
                f"a batch of {len(requests)} requests; this engine takes 1 to {limit} (max_batch_size)"
            )
        sequences: list[GenerationSequence] = []
        for index, request in enumerate(requests):
            try:
                first_row = sequences[-1].end_row if sequences else 0
                sequences.append(self._prepare(request, first_row, noise_seed))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}" if len(requests) > 1 else str(error)) from None
        return sequences

    def prepare_system_prompt(self, system_prompt: str, lora: str) -> GenerationSequence:
        """Make a sequence of the prefix that all prompts of a system prompt share.

        ValueError if the system prompt is empty, too long, or not the first part of the chat template.
        """
        request = LLMGenerationRequest("", system_prompt=system_prompt, lora=lora)
        token_ids = self._prompts.system_prefix(system_prompt)
        sequence = self._make_sequence(request, token_ids, [], [], [], first_row=0)
        sequence.begins_later_prompts = True
        return sequence

    def prepare_next_turn(self, answered: GenerationSequence) -> GenerationSequence | None:
        """Make a sequence of the ids that the next turn of a conversation begins with.

        It has the encoder rows of the answered sequence, which must not have been overwritten. None if there
        can be no next turn: the request has no messages, the prompt would be too long, or the chat template
        refuses it.
        """
        if answered.request.messages is None:
            return None
        request = dataclasses.replace(answered.request, on_progress=None, cancel=None)
        grids, videos, sounds = answered.image_grids, answered.videos, answered.audio_tokens
        try:
            token_ids = self._prompts.next_turn_prefix(
                request, answered.text.text, answered.image_tokens, sounds, _token_ids(videos)
            )
            turn = self._make_sequence(request, token_ids, grids, videos, sounds, answered.first_row)
        except ValueError:
            return None
        turn.adapter, turn.encoded_rows = answered.adapter, answered.encoded_rows
        turn.begins_later_prompts = True
        return turn

    def _prepare(self, request: LLMGenerationRequest, first_row: int, noise_seed: int) -> GenerationSequence:
        self._check_against_engine(request)
        action = self._config.expert
        speed, history = request.speed or 0.0, []
        if action is not None:
            points = check_history(request.history, action.trajectory_history)
            history = history_tokens(points, action.trajectory_history)
            if request.speed is None:
                with np.errstate(over="ignore"):  # an infinite speed is refused below
                    speed = history_speed(points, action.trajectory_history)
                check_speed("the speed of the history", speed)
        images, sounds = request.prompt_images, request.prompt_audio
        grids = [self._vision.token_grid(image) for image in images] if self._vision else []
        image_tokens = [height * width for height, width in grids]
        videos = [self._lay_out(video) for video in request.prompt_videos]
        audio_tokens = [self._audio.num_tokens(sound) for sound in sounds] if self._audio else []
        token_ids = self._prompts.build(request, image_tokens, audio_tokens, history, _token_ids(videos))
        sequence = self._make_sequence(request, token_ids, grids, videos, audio_tokens, first_row)
        grammar = request.sampling.grammar
        if grammar is not None:
            sequence.grammar = self._grammars.start(grammar)
        sequence.speed = speed
        sequence.noise_seed = noise_seed if request.noise_seed is None else request.noise_seed
        return sequence

    def _make_sequence(
        self,
        request: LLMGenerationRequest,
        token_ids: list[int],
        grids: list[tuple[int, int]],
        videos: list[VideoLayout],
        audio_tokens: list[int],
        first_row: int,
    ) -> GenerationSequence:
        config, action, tokens = self._config, self._config.expert, self._config.special_tokens
        if not token_ids:
            raise ValueError("the prompt has 0 tokens: the chat template rendered an empty text")
        if len(token_ids) > config.builder.max_input_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; this engine takes at most "
                f"{config.builder.max_input_len} (max_input_len)"
            )
        positions, delta = plain_rope_index(len(token_ids)), 0.0
        if config.use_context_dependent_rope:
            positions, delta = get_rope_index(
                token_ids,
                grids,
                tokens.image_token_id,
                tokens.vision_start_token_id,
                [block for video in videos for block in video.blocks],
                config.video_token_id,
            )
        capacity = config.builder.max_kv_cache_capacity
        beyond = max(math.ceil(delta), 0)  # positions; times of a video may be beyond the number of tokens
        if len(token_ids) + beyond >= capacity:
            raise ValueError(
                f"the times of the videos reach position {len(token_ids) + beyond - 1}; this engine has "
                f"positions up to {capacity - 1} (max_kv_cache_capacity)"
            )
        room = capacity - len(token_ids) - beyond
        before = token_ids[-1:] if request.continue_final_message else ()
        return GenerationSequence(
            request=request,
            adapter=self._loras.get(request.lora),
            token_ids=token_ids,
            image_grids=grids,
            audio_tokens=audio_tokens,
            first_row=first_row,
            positions=positions,
            rope_delta=delta,
            max_tokens=min(request.sampling.max_tokens, room),
            stop_token_ids=config.stop_token_ids,
            future_start_token_id=action.future_start_token_id if action else None,
            text=TextStream(self._tokenizer, request.sampling.stop, before),
            videos=videos,
        )

    def _lay_out(self, video: Video) -> VideoLayout:
        config, vision = self._config, self._vision
        assert vision is not None
        assert vision.videos is not None  # `_check_against_engine` has refused the request
        grid, tokens = vision.video_grid(video), config.special_tokens
        return lay_out_video(video, grid, vision.videos, config.video, self._tokenizer, tokens)

    def _check_against_engine(self, request: LLMGenerationRequest) -> None:
        if request.prompt_images and self._vision is None:
            raise ValueError("this engine has no vision encoder, the request has images")
        if request.prompt_videos and (self._vision is None or self._vision.videos is None):
            raise ValueError("this engine takes no videos, the request has a video")
        if request.prompt_audio and self._audio is None:
            raise ValueError("this engine has no audio encoder, the request has audio")
        if request.logprobs > self._config.llm.output_vocab_size:
            raise ValueError(
                f"logprobs {request.logprobs} exceeds the vocabulary of "
                f"{self._config.llm.output_vocab_size} tokens"
            )
        if request.state is not None or request.cameras:
            field = "cameras" if request.state is None else "a state"
            raise ValueError(f"this engine is no policy, the request has {field}")
        if self._action is None:
            if request.action_samples or request.history is not None:
                raise ValueError("this engine has no action head, the request has action_samples or history")
            if request.previous_chunk is not None:
                raise ValueError("this engine has no action head, the request has a previous_chunk")
            return
        if request.previous_chunk is not None:
            try:
                self._action.check(request.previous_chunk)
            except ValueError as error:
                raise ValueError(f"previous_chunk: {error}") from None
        if request.action_samples > self._action.max_samples:
            raise ValueError(
                f"action_samples is {request.action_samples}; this engine takes at most "
                f"{self._action.max_samples} (max_action_samples)"
            )


def _token_ids(videos: Sequence[VideoLayout]) -> list[Sequence[int]]:
    return [video.token_ids for video in videos]
