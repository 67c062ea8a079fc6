# SPDX-License-Identifier: Apache-2.0
"""`edgellm security`: the permissions of the nodes, for DDS security (SROS 2)."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from edgellm_ros.cli import arguments

PLAN_CLIENT = "plan_client"  # as in ros.security.access, which `edgellm --help` does not import


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "security",
        help="write what each node may do, and the keys for it",
        description="Write the policy of a robot for DDS security: an enclave for each node, with exactly "
        "the topics, services and actions that it uses. With sros2, a part of ROS, also the keystore: "
        "keys, certificates and signed permissions, for the domain ROS_DOMAIN_ID.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for policy.xml and the folder keystore"
    )
    parser.add_argument(
        "--namespace", default="/", metavar="NS", help="namespace of the nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--remap",
        action="append",
        default=[],
        metavar="NODE:NAME:=NEW",
        help="a node's remapping, such as edgellm:~/image:=/camera/image_raw or edgellm:__node:=brain; "
        "follower.launch.py's are known; may be repeated",
    )
    parser.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="NAME",
        help=f"name of a node that sends goals of ~/plan; may be repeated (default: {PLAN_CLIENT})",
    )
    parser.add_argument(
        "--camera",
        action="append",
        default=[],
        metavar="NAME",
        help="a policy's camera besides the one on ~/image, with frames on ~/NAME/image; may be repeated",
    )
    parser.add_argument(
        "--arena",
        action="store_true",
        help="for the simulated world of demo.launch.py: with an enclave for it, and its topics",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the policy and, where sros2 is installed, the keystore."""
    from edgellm_ros.atomic_file import write_atomically
    from edgellm_ros.ros.security.keystore import has_sros2, make_keystore
    from edgellm_ros.ros.security.policy import make_enclaves, parse_remapping, policy_xml

    remappings = dict(parse_remapping(text, args.camera) for text in args.remap)
    clients = args.client or [PLAN_CLIENT]
    enclaves = make_enclaves(args.namespace, remappings, clients, args.arena, args.camera)
    policy, keystore = args.out / "policy.xml", args.out / "keystore"
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(policy, policy_xml(enclaves).encode())
    paths = [enclave.path for enclave in enclaves]
    signed = has_sros2()
    if signed:
        make_keystore(keystore, policy, paths)
    report = sys.stderr if args.json else sys.stdout
    print(f"{policy}: {len(paths)} enclaves: {', '.join(paths)}", file=report)
    if signed:
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        print(f"{keystore}: keys and permissions for domain {domain}", file=report)
    else:
        command = ["ros2", "security", "generate_artifacts", "-k", str(keystore), "-p", str(policy)]
        print(f"sros2 is not installed here; where it is, run: {shlex.join(command)}", file=report)
    if args.json:
        arguments.print_json(
            {"policy": str(policy), "keystore": str(keystore) if signed else None, "enclaves": paths}
        )
    return 0
