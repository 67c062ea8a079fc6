# SPDX-License-Identifier: Apache-2.0
"""`edgellm chat`: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments
from edgellm_ros.cli.engine_argument import add_engine, engine_directory
from edgellm_ros.cli.requests.answer_output import Streamer
from edgellm_ros.cli.requests.request_options import add_sampling, lora_dirs, sampling_params
from edgellm_ros.echo import escaped, printable, quoted
from edgellm_ros.io.image_file import read_image
from edgellm_ros.messages.engine_readers import sound_reader

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.hearing.transcriber import Transcriber
    from edgellm_ros.runtime.conversation import Message, Part
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

COMMANDS = {
    "/image": "FILE    show an image with the next line",
    "/audio": "FILE    play a sound with the next line; with --speech-engine its words are a line",
    "/system": "TEXT   set the system prompt (without TEXT: none)",
    "/reset": "        forget the conversation, except the system prompt",
    "/help": "         show these commands",
    "/quit": "         end the chat, as Ctrl-D does",
}
PROMPT = "> "


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model, line by line, with images and sounds",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Each line of standard input is a message; the answer is printed while it is generated.\n"
        "Ctrl-C ends an answer, and not the chat. A line that begins with // is a message with one /.\n\n"
        + "\n".join(f"  {name} {text}" for name, text in COMMANDS.items()),
    )
    add_engine(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument(
        "--thinking",
        choices=("on", "off"),
        help="enable_thinking of the chat template (default: the template's)",
    )
    parser.add_argument(
        "--lora",
        default="",
        metavar="NAME[=DIR]",
        help="LoRA adapter to answer with, as for `edgellm generate` (default: the base model)",
    )
    parser.add_argument(
        "--speech-engine",
        metavar="DIR",
        help="engine directory of a model for speech, such as Qwen3-ASR, which transcribes sounds (default: "
        "the model itself hears)",
    )
    add_sampling(parser)
    arguments.add_runtime(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the engines, then answer line by line until the input ends."""
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.hearing.transcriber import Transcriber
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    sampling_params(args)  # wrong options are refused before the engines load
    args.engine_dir = engine_directory(args.engine_dir, args.device)
    config = EngineConfig.load(args.engine_dir)
    config.check_answers_with_text("a chat")
    adapters = lora_dirs(args.lora, args.engine_dir)
    options = arguments.runtime_options(args, config)
    with contextlib.ExitStack() as opened:
        transcriber = None
        if args.speech_engine is not None:
            transcriber = opened.enter_context(Transcriber(args.speech_engine, args.device))
        runtime = opened.enter_context(LLMInferenceRuntime(args.engine_dir, lora_dirs=adapters, **options))
        chat = Chat(runtime, args, config, transcriber)
        for line in _lines():
            if not chat.take(line):
                break
    return 0


class Chat:
    """The conversation so far, and the parts of the next message."""

    def __init__(
        self,
        runtime: LLMInferenceRuntime,
        args: argparse.Namespace,
        config: EngineConfig,
        transcriber: Transcriber | None = None,
    ) -> None:
        self._runtime = runtime
        self._transcriber = transcriber
        self._args = args
        self._config = config
        hears = config if transcriber is None else transcriber.runtime.config
        self._read_sound = sound_reader(args.speech_engine or args.engine_dir, hears)
        self._system = args.system
        self._turns: list[Message] = []
        self._parts: list[Part] = []

    def take(self, line: str) -> bool:
        """Do what a line says; return False to end the chat.

        Errors of a line are reported. A message without an answer is dropped; earlier turns stay.
        """
        from edgellm_ros.engine.errors import EngineError

        line = line.rstrip("\r\n")
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._command(*line.partition(" ")[::2])
            if line.strip() or self._parts:
                self._answer(line.removeprefix("/"))
        except (ValueError, OSError, EngineError) as error:
            print(f"error: {escaped(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return True

    def _command(self, name: str, text: str) -> bool:
        from edgellm_ros.engine_directory.parts import AUDIO, VISUAL
        from edgellm_ros.runtime.conversation import AudioPart, ImagePart

        text = text.strip()
        if name in ("/image", "/audio") and not text:
            raise ValueError(f"{name} needs a file")
        if name == "/image":
            if missing := self._runtime.parts.missing(VISUAL):
                raise ValueError(f"{self._args.engine_dir}: {missing}")
            image = read_image(Path(text))
            self._parts.append(ImagePart(image))
            self._taken("image", text, f"{image.shape[1]}x{image.shape[0]}")
        elif name == "/audio" and self._transcriber is not None:
            transcript = self._transcriber.transcribe(self._read_sound(Path(text)))
            print(f"heard: {printable(transcript.text)}", file=sys.stderr, flush=True)
            if not transcript.text:
                raise ValueError(f"{text}: no words")
            self._answer(transcript.text)
        elif name == "/audio":
            if missing := self._runtime.parts.missing(AUDIO):
                raise ValueError(f"{self._args.engine_dir}: {missing}")
            sound = self._read_sound(Path(text))
            self._parts.append(AudioPart(sound))
            self._taken("sound", text, f"{len(sound.samples) / sound.sample_rate:.1f} s")
        elif name == "/system":
            self._system = text
        elif name == "/reset":
            self._turns, self._parts = [], []
        elif name == "/help":
            print("\n".join(f"{name} {text}" for name, text in COMMANDS.items()), file=sys.stderr, flush=True)
        elif name == "/quit":
            return False
        else:
            raise ValueError(f"unknown command {quoted(name)}; /help shows the commands")
        return True

    def _taken(self, kind: str, path: str, size: str) -> None:
        """Acknowledge a file that goes with the next line."""
        print(f"{kind}: {printable(Path(path).name)}, {size}", file=sys.stderr, flush=True)

    def _answer(self, text: str) -> None:
        """Answer one message; the message and the answer join the conversation."""
        from edgellm_ros.runtime.conversation import ASSISTANT, USER, Message, TextPart
        from edgellm_ros.runtime.request import LLMGenerationRequest

        parts = [*self._parts, *([TextPart(text)] if text else [])]
        self._parts = []
        message = Message(USER, parts if len(parts) > 1 or not text else text)
        system = [Message("system", self._system)] if self._system else []
        streamer = Streamer(sys.stdout)
        with _interrupt_sets(threading.Event()) as cancel:
            response = self._runtime.handle_request(
                LLMGenerationRequest(
                    messages=(*system, *self._turns, message),
                    lora=self._args.lora.partition("=")[0],
                    sampling=sampling_params(self._args),
                    enable_thinking={"on": True, "off": False, None: None}[self._args.thinking],
                    on_progress=streamer,
                    cancel=cancel,
                )
            )
        streamer.finish(response.text)
        self._turns += [message, Message(ASSISTANT, response.text)]


def _lines() -> Iterator[str]:
    """Read lines of standard input; in a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() history and editing
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends the chat", file=sys.stderr)


@contextlib.contextmanager
def _interrupt_sets(event: threading.Event) -> Iterator[threading.Event]:
    """Set the event on Ctrl-C, in place of a KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
