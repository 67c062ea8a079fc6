# SPDX-License-Identifier: Apache-2.0
"""Notices clients of ~/plan whose nodes have left the ROS graph."""

from __future__ import annotations

from collections import Counter

from rclpy.node import Node, NodeNameNonExistentError

from edgellm_ros.ros.node.worker.worker import PlanWorker

UNSEEN_LOOKS = 3  # without a node of the name; discovery tells the name of a new node after its first goal


class Clients:
    """Tells the worker which clients of its waiting goals have left.

    A client is known by the full name of its node (Plan.Goal.client). It has left when the graph had its node
    and has it no more, or when UNSEEN_LOOKS looks did not find it. A name without a leading slash is no
    node's and cannot leave.
    """

    def __init__(self, node: Node, worker: PlanWorker) -> None:
        self._node = node
        self._worker = worker
        # Only names of waiting goals are kept:
        self._seen: set[str] = set()  # in the graph
        self._unseen: Counter[str] = Counter()  # looks that did not find a node that no look has found
        self._gone: set[str] = set()

    def sent(self, client: str) -> None:
        """Look for a client that sends a goal, so that it is known also if it leaves soon.

        Goes through the graph for a new name and for one that has left, not for each goal.
        """
        if client and (client not in self._seen or client in self._gone):
            self._look(self._worker.clients | {client})

    def look(self) -> None:
        """Compare the clients of the waiting goals with the graph, once per second."""
        clients = self._worker.clients
        if clients or self._seen or self._unseen:
            self._look(clients, counted=True)

    def _look(self, clients: set[str], counted: bool = False) -> None:
        present = {client for client in clients & self._names() if self._has_endpoints(client)}
        self._seen = (self._seen | present) & clients
        unseen = {name for name in clients - self._seen if name.startswith("/")}
        self._unseen = Counter({name: self._unseen[name] + counted for name in unseen})
        never = {name for name, looks in self._unseen.items() if looks >= UNSEEN_LOOKS}
        self._gone = (self._seen - present) | never
        self._worker.set_gone(self._gone)

    def _names(self) -> set[str]:
        """Return the full names of the nodes in the graph."""
        nodes = self._node.get_node_names_and_namespaces()
        return {f"{namespace.rstrip('/')}/{name}" for name, namespace in nodes}

    def _has_endpoints(self, client: str) -> bool:
        """Return whether a node of the graph has a topic or a service client.

        The graph may keep the name of a node that has ended: rmw enters it again when a message about the
        node's endpoints (ros_discovery_info) is read after the node has left. Its endpoints are gone.
        """
        namespace, _, name = client.rpartition("/")
        try:
            return bool(
                self._node.get_publisher_names_and_types_by_node(name, namespace or "/")
                or self._node.get_client_names_and_types_by_node(name, namespace or "/")
            )
        except NodeNameNonExistentError:  # has left meanwhile
            return False
