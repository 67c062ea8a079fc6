# SPDX-License-Identifier: Apache-2.0
"""`edgellm transcribe`: sound files to text, with a model for speech to text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli import arguments
from edgellm_ros.messages.engine_readers import sound_reader

if TYPE_CHECKING:
    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.runtime.request import LLMGenerationResponse
    from edgellm_ros.runtime.transcript import Transcript


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "transcribe",
        help="write what sound files say, with a model for speech to text",
        description="Print the text of each sound to standard output, after the file's name if there are "
        "several. Language, confidence and times go to standard error.",
    )
    arguments.add_engine_dir(parser)
    parser.add_argument(
        "sounds",
        nargs="+",
        metavar="SOUND",
        help="sound file (WAV, FLAC, OGG; any rate and number of channels)",
    )
    parser.add_argument(
        "--language",
        metavar="NAME",
        help="language that is spoken, by its English name or code, such as German or de (default: the model "
        "finds it)",
    )
    parser.add_argument(
        "--context",
        default="",
        metavar="TEXT",
        help="words that may be said, such as names of places and objects (default: none)",
    )
    arguments.add_device(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the sounds, then print the transcript of each."""
    from edgellm_ros.hearing.transcriber import Transcriber, speech_engine_config
    from edgellm_ros.runtime.transcript import language_name

    config = speech_engine_config(args.engine_dir)
    language = "" if args.language is None else language_name(args.language)
    read = sound_reader(args.engine_dir, config)
    sounds = [read(path) for path in args.sounds]
    results = []
    with Transcriber(args.engine_dir, args.device) as transcriber:
        for path, sound in zip(args.sounds, sounds, strict=True):
            try:
                transcript, response = transcriber.answer(sound, language, args.context)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            results.append(_to_json(path, sound, transcript, response))
            if not args.json:
                print(f"{path}: {transcript.text}" if len(sounds) > 1 else transcript.text, flush=True)
                print(_describe(sound, transcript, response), file=sys.stderr)
    if args.json:
        arguments.print_json({"transcripts": results})
    return 0


def _to_json(
    path: str, sound: Sound, transcript: Transcript, response: LLMGenerationResponse
) -> dict[str, Any]:
    return {
        "file": path,
        "text": transcript.text,
        "language": transcript.language,
        "confidence": transcript.confidence,
        "finish_reason": response.finish_reason,
        "sound_s": sound.seconds,
        "total_s": response.metrics["total_s"],
    }


def _describe(sound: Sound, transcript: Transcript, response: LLMGenerationResponse) -> str:
    """Describe a transcript for people, on one line."""
    confidence = "none" if transcript.confidence is None else f"{transcript.confidence:.2f}"
    cut = "" if response.finish_reason == "stop" else f", cut off after {len(response.token_ids)} tokens"
    return (
        f"[language: {transcript.language or 'none'}, confidence {confidence}{cut}, {sound.seconds:.1f} s of "
        f"sound in {response.metrics['total_s']:.2f} s]"
    )
