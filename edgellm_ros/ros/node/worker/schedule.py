# SPDX-License-Identifier: Apache-2.0
"""The order of the planning thread's jobs: which one gets the next free slot.

    driving   [ the newest command or camera frame ] --+
                                                       +--> next free slot
    goals     [ a1  a2  b1 | loras | a3  c1 ] ---------+

No job is interrupted for another class: a job that waits for its turn waits for the running job at most, and
for the jobs that the rule of `take` puts before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from edgellm_ros.ros.node.worker.job import Job

COMMANDS_PER_GOAL = 10  # a source of commands that never rests must leave something to goals


class Schedule:
    """The jobs that wait. Not thread-safe: the worker holds its lock.

    `gone`: clients that have left; their goals wait until no other goal does.
    """

    def __init__(self) -> None:
        self.driving: Job | None = None
        self.goals: list[Job] = []
        self.gone: Set[str] = frozenset()
        self.started: Counter[str] = Counter({"driving": 0, "goals": 0})
        self._in_a_row = 0  # driving jobs since the last goal
        self._passed_by = 0  # those of them that started while a goal waited
        self._last_client: str | None = None  # of the last goal

    @property
    def is_waiting(self) -> bool:
        """Whether a job waits."""
        return self.driving is not None or bool(self.goals)

    def take(self, driving_plans_per_goal: int) -> tuple[bool, Job]:
        """Remove the job that runs next; return whether it is of driving, and the job.

        Driving goes first, unless a goal waits and since the last goal `driving_plans_per_goal` jobs of
        driving have started. A command goes first until 10 jobs, or `driving_plans_per_goal` if that is more,
        have started while a goal waited. Goals of clients that have left never go before driving. Among
        goals, clients take turns.
        """
        driving = self.driving
        if driving is not None and not self._goals_go_first(driving, driving_plans_per_goal):
            self.driving = None
            self._in_a_row += 1
            self._passed_by += bool(self.goals)
            self.started["driving"] += 1
            return True, driving
        job = self._next_goal()
        self.goals.remove(job)
        self._in_a_row, self._passed_by, self._last_client = 0, 0, job.client
        self.started["goals"] += 1
        return False, job

    def displaced_by(self, client: str) -> Job | None:
        """Return the waiting goal that makes room for one of `client`; None if none does.

        The newest goal of a client that has left, else of the one with the most waiting goals, if that has
        at least two more than `client`. Goals of unknown clients stay; they count as those of one client.
        """
        plans = [job for job in self.goals if job.is_plan]
        named = [job for job in plans if job.client]
        waiting = Counter(job.client for job in plans)
        left = [job for job in named if job.client in self.gone]
        if left or not named:
            return left[-1] if left else None
        greediest = max((job.client for job in named), key=waiting.__getitem__)
        if waiting[greediest] < waiting[client] + 2:
            return None
        return next(job for job in reversed(named) if job.client == greediest)

    def _goals_go_first(self, driving: Job, driving_plans_per_goal: int) -> bool:
        if all(job.is_plan and job.client in self.gone for job in self.goals):
            return False
        if driving.is_command:
            return self._passed_by >= max(driving_plans_per_goal, COMMANDS_PER_GOAL)
        return self._in_a_row >= driving_plans_per_goal

    def _next_goal(self) -> Job:
        """Return the goal whose client is next; other work keeps its place in the queue.

        Goals of clients that have left go to the end, after the other work too.
        """
        self.goals.sort(key=lambda job: job.client in self.gone)
        first = self.goals[0]
        if not first.is_plan or first.client in self.gone:
            return first
        barrier = next(
            (i for i, job in enumerate(self.goals) if not job.is_plan or job.client in self.gone),
            len(self.goals),
        )
        before = self.goals[:barrier]
        # The client that had the last turn goes to the back. As jobs keep their places, clients take turns.
        before.sort(key=lambda job: job.client == self._last_client)
        self.goals[:barrier] = before
        return before[0]
