# SPDX-License-Identifier: Apache-2.0
"""Makes a robot's policy: an XML file that `ros2 security` turns into permissions.

The policy has one enclave per node. Each allows the names of the table in access.py, at the robot's namespace
and with its remappings, and nothing else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from edgellm_ros.echo import quoted
from edgellm_ros.ros.security.access import (
    ARENA,
    ARENA_REMAPPINGS,
    INTERFACES,
    PLAN_CLIENT,
    REMAPPINGS,
    Kind,
    camera_interfaces,
)

VERSION = "0.2.0"  # of the policy format, sros2/policy/schemas/policy.xsd
NAME = re.compile(r"(?!.*__)[A-Za-z_][A-Za-z0-9_]*")  # of a node
FULL_NAME = re.compile(r"(?!.*__)(/[A-Za-z_][A-Za-z0-9_]*)+")
FROM_NAME = re.compile(r"~/[A-Za-z_][A-Za-z0-9_/]*|__node")
# Rights in the order in which they are written: (element, attribute).
PUBLISH, SUBSCRIBE = ("topics", "publish"), ("topics", "subscribe")
REPLY, REQUEST = ("services", "reply"), ("services", "request")
EXECUTE, CALL = ("actions", "execute"), ("actions", "call")
RIGHTS = (PUBLISH, SUBSCRIBE, REPLY, REQUEST, EXECUTE, CALL)
OWN = {Kind.OUT: PUBLISH, Kind.IN: SUBSCRIBE, Kind.SERVICE: REPLY, Kind.ACTION: EXECUTE}
OTHERS = {Kind.OUT: SUBSCRIBE, Kind.IN: PUBLISH, Kind.SERVICE: REQUEST, Kind.ACTION: CALL}

Right = tuple[str, str]
Remappings = Mapping[tuple[str, str], str]


@dataclass
class Enclave:
    """What one node may do."""

    namespace: str
    node: str
    allowed: dict[Right, set[str]] = field(default_factory=lambda: defaultdict(set))  # full names

    @property
    def path(self) -> str:
        """The name of the enclave."""
        return expand("~", self.namespace, self.node)


def parse_remapping(text: str, cameras: Sequence[str] = ()) -> tuple[tuple[str, str], str]:
    """Return node, name, new name of "NODE:NAME:=NEW", as after `--ros-args --remap`.

    `cameras`: of a policy, besides the one on ~/image. ValueError for another form.
    """
    interfaces = (*INTERFACES, *camera_interfaces(cameras))
    rule, _, new = text.partition(":=")
    node, _, name = rule.partition(":")
    if not NAME.fullmatch(node) or not FROM_NAME.fullmatch(name) or not new:
        raise ValueError(f"a remapping must be NODE:~/NAME:=NEW or NODE:__node:=NEW, got {quoted(text)}")
    if node not in {interface.node for interface in INTERFACES}:
        known = ", ".join(dict.fromkeys(interface.node for interface in INTERFACES))
        raise ValueError(f"remapping {quoted(text)}: no node {quoted(node)}, expected one of {known}")
    if name != "__node" and (node, name) not in {(each.node, each.name) for each in interfaces}:
        raise ValueError(f"remapping {quoted(text)}: the node {node} has no {quoted(name)}")
    return (node, name), new


def make_enclaves(
    namespace: str,
    remappings: Remappings,
    clients: Sequence[str] = (PLAN_CLIENT,),
    arena: bool = False,
    cameras: Sequence[str] = (),
) -> list[Enclave]:
    """Return the enclaves of a robot.

    - namespace: of all nodes
    - remappings: (node, name) -> new name, besides those of the launch files
    - clients: names of the nodes that send goals
    - arena: the simulated world is in the robot's place, with the topics of demo.launch.py
    - cameras: of a policy, besides the one on ~/image

    ValueError for a name that ROS does not allow.
    """
    namespace = "/" + namespace.strip("/")
    if namespace != "/":
        _check("namespace", FULL_NAME, namespace)
    for client in clients:
        _check("client", NAME, client)
    rules = {**(ARENA_REMAPPINGS if arena else REMAPPINGS), **remappings}
    enclaves: dict[str, list[Enclave]] = {}
    for role in dict.fromkeys(interface.node for interface in INTERFACES):
        names = list(clients) if role == PLAN_CLIENT else [rules.get((role, "__node"), role)]
        for name in names:
            _check("node", NAME, name)
        if role != ARENA or arena:
            enclaves[role] = [Enclave(namespace, name) for name in names]
    for interface in (*INTERFACES, *camera_interfaces(cameras)):
        for owner in enclaves.get(interface.node, ()):
            renamed = rules.get((interface.node, interface.name), interface.name)
            name = expand(renamed, namespace, owner.node)
            if renamed != interface.name:
                _check(f"new name of {interface.name}", FULL_NAME, name)
            owner.allowed[OWN[interface.kind]].add(name)
            for user in (each for role in interface.users for each in enclaves.get(role, ())):
                user.allowed[OTHERS[interface.kind]].add(name)
    found = [enclave for each in enclaves.values() for enclave in each]
    paths = [enclave.path for enclave in found]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"two nodes are called {path}: give each another name")
    return found


def expand(name: str, namespace: str, node: str) -> str:
    """Return the full name of a topic or service of a node."""
    base = namespace.rstrip("/")
    if name.startswith("~"):
        return f"{base}/{node}{name[1:]}"
    return name if name.startswith("/") else f"{base}/{name}"


def policy_xml(enclaves: Sequence[Enclave]) -> str:
    """Return the policy as the text of an XML file."""
    policy = ElementTree.Element("policy", version=VERSION)
    parent = ElementTree.SubElement(policy, "enclaves")
    for enclave in enclaves:
        profiles = ElementTree.SubElement(
            ElementTree.SubElement(parent, "enclave", path=enclave.path), "profiles"
        )
        profile = ElementTree.SubElement(profiles, "profile", ns=enclave.namespace, node=enclave.node)
        for element, attribute in RIGHTS:
            names = sorted(enclave.allowed.get((element, attribute), ()))
            if names:
                listed = ElementTree.SubElement(profile, element, {attribute: "ALLOW"})
                for name in names:
                    ElementTree.SubElement(listed, element.removesuffix("s")).text = name
    ElementTree.indent(policy)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(policy, encoding="unicode")}\n'


def _check(what: str, allowed: re.Pattern[str], name: str) -> None:
    if not allowed.fullmatch(name):
        raise ValueError(f"{what} must be a name of ROS: letters, digits and single '_', got {quoted(name)}")
