# SPDX-License-Identifier: Apache-2.0
"""`edgellm connect-policy`: a policy on another computer as an engine directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli import arguments
from edgellm_ros.cli.remote.key_options import add_keys, read_keys
from edgellm_ros.echo import quoted

if TYPE_CHECKING:
    from edgellm_ros.diffusion.openpi_config import OpenPiConfig

FRAME = (224, 224)  # height and width of a test image, if nothing tells others


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "connect-policy",
        help="make an engine directory that asks a policy on another computer",
        description="Ask a server of openpi's protocol once, with black images and a state of zeros, and "
        "write an engine directory whose actions come from it (docs/remote.md). `edgellm serve-policy` tells "
        "names, keys and rate; for other servers give them.",
    )
    parser.add_argument("url", metavar="URL", help="ws://HOST:PORT, or wss:// through a proxy with TLS")
    parser.add_argument("engine_dir", metavar="ENGINE_DIR", help="directory to write; created if missing")
    parser.add_argument("--token-file", default="", metavar="FILE", help="file with the server's token")
    parser.add_argument(
        "--timeout",
        type=arguments.number(0.1, 600),
        default=5.0,
        metavar="S",
        help="seconds to connect, and to wait for each chunk (default: %(default)s)",
    )
    parser.add_argument(
        "--image-size",
        type=_size,
        default=(),
        metavar="HxW",
        help="resize frames to this size before they are sent, with black borders; many servers of openpi "
        "take 224x224 (default: as they are)",
    )
    for name, what in (("state", "the state, in order"), ("action", "the actions, in order")):
        parser.add_argument(
            f"--{name}-names",
            type=_names,
            default=(),
            metavar="NAME[,NAME]",
            help=f"names of {what} (default: the server's)",
        )
    parser.add_argument(
        "--fps",
        type=arguments.number(0.1, 1000),
        metavar="HZ",
        help="rows of a chunk per second (default: the server's)",
    )
    parser.add_argument(
        "--state-size",
        action="append",
        type=arguments.integer(1),
        default=[],
        metavar="N",
        help="values at each --state-key, if there are several",
    )
    add_keys(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and write the directory."""
    from edgellm_ros.builder.remote_policy import write_remote_policy
    from edgellm_ros.openpi.client import PolicyClient
    from edgellm_ros.openpi.token import read_token

    token = read_token(args.token_file) if args.token_file else ""
    client = PolicyClient(args.url, token=token, timeout_s=args.timeout)
    try:
        policy = _ask(client, args, client.connect())
    finally:
        client.close()
    write_remote_policy(policy, args.engine_dir)
    space = policy.action_space
    if args.json:
        keys = {
            "image_keys": policy.image_keys,
            "state_keys": policy.state_keys,
            "prompt_key": policy.prompt_key,
        }
        found = {"horizon": space.horizon, "dt": space.dt, "action_names": space.names}
        arguments.print_json({"engine_dir": args.engine_dir, **found, **keys})
    else:
        keys_text = ", ".join((*policy.image_keys, *policy.state_keys, policy.prompt_key))
        print(f"{args.engine_dir}: {space.horizon} actions of {', '.join(space.names)}; keys {keys_text}")
    return 0


def _ask(client: Any, args: argparse.Namespace, metadata: Any) -> OpenPiConfig:
    """Return the configuration, after one answer of the server.

    ValueError names an option.
    """
    import numpy as np

    from edgellm_ros.builder.remote_policy import physical_actions, physical_state
    from edgellm_ros.diffusion.openpi_config import OpenPiConfig
    from edgellm_ros.diffusion.policy_config import CameraConfig
    from edgellm_ros.runtime.policy.remote_engine import make_observation

    told = metadata if isinstance(metadata, dict) and metadata.get("server") == "edgellm" else {}
    keys = _keys(args, told)
    state = physical_state(args.state_names or _texts(told, "state_names"))
    actions = args.action_names or _texts(told, "action_names")
    if not actions:
        raise ValueError("--action-names: the server does not tell them")
    if args.fps and "dt" in told:
        raise ValueError(f"--fps: the server tells that an action is {told['dt']} s")
    dt = 1 / args.fps if args.fps else told.get("dt")
    if not isinstance(dt, float):
        raise ValueError("--fps: the server does not tell how many rows a chunk has per second")
    units = () if args.action_names else _texts(told, "action_units")

    def policy(horizon: int) -> OpenPiConfig:
        return OpenPiConfig(
            cameras=CameraConfig(keys.cameras),
            state=state,
            action_space=physical_actions(actions, units or ("",) * len(actions), dt=dt, horizon=horizon),
            url=args.url,
            token_file=str(Path(args.token_file).resolve()) if args.token_file else "",
            image_keys=keys.images,
            image_size=args.image_size,
            state_keys=keys.state,
            state_sizes=_state_sizes(args.state_size, keys.state, 0 if state is None else state.dim),
            prompt_key=keys.prompt,
            timeout_s=args.timeout,
        )

    images = [np.zeros((*_frame(told, camera), 3), np.uint8) for camera in keys.cameras]
    zeros = None if state is None else np.zeros((1, state.dim), np.float32)
    found = client.infer(make_observation(policy(1), images, zeros, "stand still"))
    if found.shape[1] != len(actions):
        raise ValueError(
            f"--action-names: the server answers with {found.shape[1]} values, got {len(actions)} names"
        )
    return policy(len(found))


def _keys(args: argparse.Namespace, told: dict[str, Any]) -> Any:
    images = told.get("image_keys")
    if isinstance(images, dict) and images and all(isinstance(key, str) for key in images.values()):
        args.image_key = args.image_key or [f"{camera}={key}" for camera, key in images.items()]
        args.state_key = args.state_key or list(_texts(told, "state_keys"))
        if isinstance(told.get("prompt_key"), str):
            args.prompt_key = told["prompt_key"]
    cameras = [text.partition("=")[0] for text in args.image_key]
    if not cameras:
        raise ValueError("--image-key: the server does not tell its cameras: give CAMERA=KEY for each")
    return read_keys(args, cameras, bool(args.state_names or _texts(told, "state_names")))


def _state_sizes(sizes: list[int], keys: tuple[str, ...], values: int) -> tuple[int, ...]:
    if not sizes and len(keys) == 1:
        return (values,)
    if len(sizes) != len(keys) or sum(sizes) != values:
        raise ValueError(
            f"--state-size: expected one for each of {len(keys)} keys, {values} values in all, got {sizes}"
        )
    return tuple(sizes)


def _frame(told: dict[str, Any], camera: str) -> tuple[int, int]:
    sizes = told.get("image_sizes")
    size = sizes.get(camera) if isinstance(sizes, dict) else None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n <= 4096 for n in size):
        return size[0], size[1]
    return FRAME


def _texts(told: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the server's texts at a key; ValueError for something else."""
    value = told.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"the server tells {key} {quoted(value)}, expected texts")
    return tuple(value)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    number = arguments.integer(1, 4096)
    return number(height), number(width)
