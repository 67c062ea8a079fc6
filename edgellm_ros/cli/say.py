# SPDX-License-Identifier: Apache-2.0
"""`edgellm say`: a text as a sound file, in the voice of the node."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from edgellm_ros.cli import arguments


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "say",
        help="speak a text into a WAV file",
        description="Speak a text into a WAV file, sentence by sentence, as the node `edgellm` speaks.",
    )
    parser.add_argument("text", metavar="TEXT", help="text to speak; Markdown, code and emoji are left out")
    parser.add_argument(
        "--voice",
        default="espeak",
        metavar="MODEL.onnx",
        help="Piper voice, with MODEL.onnx.json beside it, or espeak, espeak:de and so on (default: "
        "%(default)s)",
    )
    parser.add_argument("--out", required=True, metavar="FILE.wav", help="file to write")
    parser.add_argument(
        "--noise-scale",
        type=arguments.number(0, 10),
        metavar="S",
        help="noise of a Piper voice in waveform and durations; 0 = the same text gives the same samples "
        "(default: the voice's)",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Speak the text and write the file."""
    from edgellm_ros.echo import quoted
    from edgellm_ros.voice.sentences import sentences_of
    from edgellm_ros.voice.voice import open_voice
    from edgellm_ros.voice.wav_file import WavFile

    sentences = sentences_of(args.text)
    if not sentences:
        raise ValueError(f"TEXT has nothing to say: expected letters or digits, got {quoted(args.text)}")
    voice = open_voice(args.voice, args.noise_scale)
    began = time.monotonic()
    file = WavFile(Path(args.out), voice.sample_rate)
    try:
        for sentence in sentences:
            for piece in voice.sounds(sentence):
                file.write(piece)
    finally:
        file.close()
    result = {
        "seconds": file.seconds,
        "sample_rate": voice.sample_rate,
        "language": voice.language,
        "sentences": len(sentences),
        "unknown_phonemes": getattr(voice, "unknown_phonemes", 0),
        "synthesis_seconds": time.monotonic() - began,
    }
    if args.json:
        arguments.print_json(result)
    else:
        print(f"{args.out}: {file.seconds:.2f} s at {voice.sample_rate} Hz, language {voice.language}")
    return 0
