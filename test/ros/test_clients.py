# SPDX-License-Identifier: Apache-2.0
"""Goals of several clients over ROS: turns, and clients that end or are killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import cv2
import pytest
import rclpy
from edgellm_ros.action import Plan

from edgellm_ros.client import PlanCall, PlanClient
from edgellm_ros.ros.node.worker.clients import UNSEEN_LOOKS, Clients
from edgellm_ros.ros.processes import ros_environment
from fixtures.node_limits import limits

LONG = {"action_samples": 16, "denoise_steps": 1000}  # keeps the action head busy for seconds
WORDS = {"action_samples": 0}
FLOOD = 6  # goals that wait

# Fast DDS says after 20 s that a killed process is gone, with this file after 3 s.
SHORT_LEASE = """
<profiles xmlns="http://www.eprosima.com">
  <participant profile_name="short_lease" is_default_profile="true"><rtps><builtin><discovery_config>
    <leaseDuration><sec>3</sec></leaseDuration>
    <leaseAnnouncement><sec>1</sec></leaseAnnouncement>
  </discovery_config></builtin></rtps></participant>
</profiles>
"""

FLOODER = f"""
    import sys
    import cv2
    from edgellm_ros.client import PlanClient

    client = PlanClient()
    frame = cv2.imread(sys.argv[2])
    calls = [client.stream(sys.argv[1], images=frame, action_samples=0) for _ in range({FLOOD})]
    print(client.name, flush=True)
    sys.stdin.read()  # until it is closed
"""


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine):
    child = start_node(
        engine_dir=arena_engine,
        autostart="true",
        max_concurrent_plans=1,
        queue_size=20,
        plan_timeout=120.0,
        max_input_age=600.0,
    )
    peer.connect()
    return child


@pytest.fixture
def client(node, domain) -> Iterator[Callable[[str], PlanClient]]:
    """`client(name)` makes a PlanClient of a node of this name."""
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    made = []

    def make(name: str) -> PlanClient:
        user = rclpy.create_node(name, context=context)
        made.append((user, PlanClient(user, connect_timeout_s=30.0)))
        return made[-1][1]

    yield make
    for user, each in made:
        each.close()
        user.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture
def busy(client, scene) -> Iterator[PlanCall]:
    """A goal that runs until it is cancelled, so that others wait."""
    call = client("busy").stream(scene.command, images=scene.pixels, **LONG)
    next(progress for progress in call if progress.stage == Plan.Feedback.ACTION)
    yield call
    call.cancel()


def queue(peer, client: PlanClient, count: int, scene, /, **arguments: object) -> list[PlanCall]:
    """Send goals and wait until they are in the queue, behind those that wait already."""
    waiting = peer.metrics()["goals_waiting"]
    arguments = {"images": scene.pixels, **WORDS, **arguments}
    calls = [client.stream(scene.command, **arguments) for _ in range(count)]
    wait_for_goals(peer, waiting + count)
    return calls


def wait_for_goals(peer, count: int) -> None:
    peer.wait(lambda: peer.metrics()["goals_waiting"] == count, f"{count} goals that wait")


def order(peer, count: int, polite: list[PlanCall]) -> str:
    """Return whose goals were planned, in order: P of the polite client, or F."""
    peer.wait(lambda: len(peer.received["generation"]) == count, "answers to all goals")
    own = {call.result().reply.generation.request_id for call in polite}
    return "".join("FP"[one.request_id in own] for one in peer.received["generation"])


def test_a_flooding_client_and_a_polite_one_take_turns(client, busy, peer, scene):
    peer.clear()
    queue(peer, client("flooder"), FLOOD, scene)
    polite = queue(peer, client("polite"), 3, scene)
    busy.cancel()
    assert order(peer, FLOOD + 3, polite) == "FPFPFPFFF"


def test_names_that_a_caller_gives_decide_the_turns(client, busy, peer, scene):
    peer.clear()
    one = client("one")
    queue(peer, one, 3, scene, client="left hand")
    polite = queue(peer, one, 2, scene, client="right hand")
    busy.cancel()
    assert order(peer, 5, polite) == "FPFPF"


def test_goals_without_a_name_run_in_their_order(client, busy, peer, scene):
    peer.clear()
    queue(peer, client("one"), 3, scene, client="")
    polite = queue(peer, client("other"), 2, scene, client="")
    busy.cancel()
    assert order(peer, 5, polite) == "FFFPP"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "ended"])
def test_queued_goals_of_a_client_that_left_do_not_block_the_others(
    end, client, busy, peer, domain, scene, tmp_path
):
    peer.clear()
    cv2.imwrite(str(tmp_path / "frame.png"), scene.pixels)
    (tmp_path / "lease.xml").write_text(SHORT_LEASE)
    flooder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FLOODER), scene.command, str(tmp_path / "frame.png")],
        env={**ros_environment(domain), "FASTRTPS_DEFAULT_PROFILES_FILE": str(tmp_path / "lease.xml")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    name = flooder.stdout.readline().decode().strip().lstrip("/")
    wait_for_goals(peer, FLOOD)
    peer.wait(lambda: name in peer.node.get_node_names(), "flooder in the graph")
    if end == "killed":
        flooder.kill()
    flooder.communicate(timeout=30)  # closes its input
    polite = queue(peer, client("polite"), 3, scene)
    peer.wait(lambda: name not in peer.node.get_node_names(), "end of the flooder")
    peer.wait(lambda: peer.metrics()["goals_orphaned"] == FLOOD, "goals of a client that has left")
    assert not busy.done()
    busy.cancel()
    assert order(peer, FLOOD + 3, polite) == "PPPFFFFFF"


class Graph:
    """A ROS graph, and the worker of a node that looks at it."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = set(nodes)
        self.ended: set[str] = set()  # nodes without endpoints
        self.clients: set[str] = set()  # of the waiting goals
        self.gone: set[str] = set()
        self.looks = 0
        self.watch = Clients(self, self)

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        self.looks += 1
        return [(path.rpartition("/")[2], path.rpartition("/")[0] or "/") for path in self.nodes]

    def get_publisher_names_and_types_by_node(self, name: str, namespace: str) -> list[tuple[str, list[str]]]:
        ended = f"{namespace.rstrip('/')}/{name}" in self.ended
        return [] if ended else [("/rosout", ["rcl_interfaces/msg/Log"])]

    def get_client_names_and_types_by_node(self, name: str, namespace: str) -> list[tuple[str, list[str]]]:
        return []

    def set_gone(self, clients: set[str]) -> None:
        self.gone = set(clients)

    def goal(self, client: str) -> None:
        self.watch.sent(client)
        self.clients.add(client)


def test_a_client_that_leaves_right_after_its_goal_is_noticed():
    graph = Graph("/robot/arm")
    graph.goal("/robot/arm")
    graph.nodes.clear()
    graph.watch.look()
    assert graph.gone == {"/robot/arm"}


def test_a_client_whose_name_outlives_it_in_the_graph_has_left():
    graph = Graph("/robot/arm")
    graph.goal("/robot/arm")
    graph.ended.add("/robot/arm")
    graph.watch.look()
    assert graph.gone == {"/robot/arm"}


def test_a_client_that_leaves_before_it_was_seen_is_noticed():
    graph = Graph()
    graph.goal("/arm")
    for _ in range(UNSEEN_LOOKS - 1):
        graph.watch.look()
    assert graph.gone == set()
    graph.watch.look()
    assert graph.gone == {"/arm"}


def test_a_client_that_is_discovered_late_has_not_left():
    graph = Graph()
    graph.goal("/arm")
    for _ in range(UNSEEN_LOOKS):
        graph.watch.look()
    graph.nodes.add("/arm")
    graph.watch.look()
    assert graph.gone == set()


def test_goals_of_a_client_that_is_not_seen_are_no_looks():
    graph = Graph()
    for _ in range(UNSEEN_LOOKS + 1):
        graph.goal("/arm")
    assert graph.gone == set()


def test_a_name_that_is_no_nodes_has_not_left():
    graph = Graph("/arm")
    for name in ("arm", "left hand", ""):
        graph.goal(name)
    for _ in range(UNSEEN_LOOKS + 1):
        graph.watch.look()
    assert graph.gone == set()


def test_a_client_that_comes_again_has_not_left():
    graph = Graph("/arm")
    graph.goal("/arm")
    graph.nodes.clear()
    graph.watch.look()
    graph.nodes.add("/arm")
    graph.goal("/arm")
    assert graph.gone == set()


def test_goals_of_a_known_client_do_not_look_at_the_graph():
    graph = Graph("/arm")
    for _ in range(5):
        graph.goal("/arm")
    assert graph.looks == 1


def test_names_are_forgotten_with_their_goals():
    graph = Graph("/arm", "/leg")
    graph.goal("/arm")
    graph.clients.clear()
    graph.goal("/leg")
    graph.nodes.clear()
    graph.watch.look()
    assert graph.gone == {"/leg"}


def test_a_name_longer_than_those_of_ros_is_refused():
    limits().check_goal(Plan.Goal(client="x" * 255))
    with pytest.raises(ValueError, match=r"^client has 256 characters, at most 255 are taken$"):
        limits().check_goal(Plan.Goal(client="x" * 256))
