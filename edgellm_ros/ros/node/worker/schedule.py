# SPDX-License-Identifier: Apache-2.0
"""The order of the jobs: which one may start now, and at which level it runs.

    driving   [ the newest command or camera frame ] ---> a lane: one plan, at DRIVING_LEVEL or that of goals
    goals     [ a1  a2  b1 | loras | a3  c1 ] ----------> places: one plan each, at its client's priority

With one plan at a time (`most` = 1) both share one place. The runtime computes plans of the highest level
first; no plan is ended for another class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from edgellm_ros.ros.node.worker.job import DRIVING, GOALS, Job
from edgellm_ros.runtime.scheduling.shares import FIRST_CLAIM

COMMANDS_PER_GOAL = 10  # a source of commands that never rests must leave something to goals
AGING_S = 1.0  # of waiting, which raise a goal by one level, up to the highest that waits
KEPT_S = 0.3  # after a plan of driving that started so soon after the one before, a place is kept for so long
DRIVING_LEVEL = FIRST_CLAIM  # above all goals, those of other robots on the runtime included
GONE_LEVEL = -100  # of goals whose client has left: below all others


class Schedule:
    """The jobs that wait and those that run.

    Not thread-safe: the worker holds its lock.

    - most: plans that run at once
    - gone: clients that have left; their goals start when nothing else waits or runs

    `now`: the time of `Job.arrival`.
    """

    def __init__(self, most: int = 1) -> None:
        self.driving: Job | None = None
        self.goals: list[Job] = []
        self.running: list[Job] = []
        self.gone: Set[str] = frozenset()
        self.started: Counter[str] = Counter({DRIVING: 0, GOALS: 0})
        self._most = most
        self._in_a_row = 0  # driving jobs without a pause, since the last goal ended
        self._passed_by = 0  # those of them that started while a goal waited or ran
        self._last_client: str | None = None  # of the last goal that started
        self._drove = float("-inf")  # when driving last started or ended
        self._comes_again = False  # whether its last plan started soon after the one before

    def take(self, driving_plans_per_goal: int, now: float) -> Job | None:
        """Start the next job: remove it from those that wait; None if none may start now.

        Driving goes first, unless it is the goals' turn: a goal waits or runs, and since the last goal ended
        `driving_plans_per_goal` jobs of driving have started. For a command it is the goals' turn after 10
        jobs, or `driving_plans_per_goal` if that is more, that started while a goal waited or ran. With more
        than one place the goals need a turn only after jobs of driving that left them no time: each waited
        already when the one before it ended. Goals of clients that have left get no turn. On the goals' turn,
        driving shares the level of the goals that run beside it, until one of them has ended; it waits if
        plans run one at a time, or if the next goal's job runs alone.
        """
        goal = self._next_goal(now)
        if self.driving is not None and self._has_lane:
            goals_turn = self._is_goals_turn(self.driving, driving_plans_per_goal)
            if not goals_turn or goal is None or not (self._most == 1 or goal.runs_alone):
                return self._start_driving(self.driving, goals_turn, goal, now)
        if goal is None or not self._may_start(goal, now):
            return None
        self.goals.remove(goal)
        self.running.append(goal)
        self._last_client = goal.client
        self.started[GOALS] += 1
        return goal

    def end(self, job: Job, now: float) -> None:
        """Note that a running job has ended; with a goal ends the goals' turn."""
        self.running.remove(job)
        if job.is_driving:
            self._drove = now
        else:
            for other in self.running:
                if other.is_driving:
                    other.raise_level(DRIVING_LEVEL)
        if not job.is_driving or (self._most > 1 and self.driving is None):
            self._in_a_row = self._passed_by = 0

    def would_wait(self, client: str, now: float) -> int:
        """Return how many goals would wait, if one of `client` came."""
        running = self._clients_that_run()
        free = self._places(now) - (len(self._plans_that_run()) if self._most == 1 else running.total())
        held_up = 0
        for each in (*(job.client for job in self.goals if job.is_plan), client):
            if free > 0 and running[each] < self._most_of_a_client(now):
                free -= 1
                running[each] += 1
            else:
                held_up += 1
        return held_up

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

    @property
    def _has_lane(self) -> bool:
        """Whether a plan of driving may run beside those that run."""
        if self._most == 1:
            return not self.running
        return not any(job.is_driving or job.runs_alone for job in self.running)

    def _is_goals_turn(self, driving: Job, driving_plans_per_goal: int) -> bool:
        if not any(job.client not in self.gone or not job.is_plan for job in (*self.goals, *self.running)):
            return False
        if driving.is_command:
            return self._passed_by >= max(driving_plans_per_goal, COMMANDS_PER_GOAL)
        return self._in_a_row >= driving_plans_per_goal

    def _start_driving(self, driving: Job, goals_turn: bool, goal: Job | None, now: float) -> Job:
        driving.level = DRIVING_LEVEL
        if goals_turn:
            beside = [*self.running, *([goal] if goal is not None else [])]
            driving.level = max(job.level for job in beside)
        self._in_a_row += 1
        self._passed_by += bool(self.goals or self.running)
        self._comes_again = self._has_just_driven(now)
        self._drove = now
        self.started[DRIVING] += 1
        self.driving = None
        self.running.append(driving)
        return driving

    def _may_start(self, goal: Job, now: float) -> bool:
        if self._most == 1 or goal.runs_alone or goal.client in self.gone:
            return not self.running
        runs_alone = any(job.runs_alone for job in self.running)
        return not runs_alone and self._clients_that_run().total() < self._places(now)

    def _places(self, now: float) -> int:
        """Return how many goals may run at once: fewer while the node drives."""
        drives = self.driving is not None or any(job.is_driving for job in self.running)
        kept = self._comes_again and self._has_just_driven(now)
        return max(1, self._most - (drives or kept))

    def _has_just_driven(self, now: float) -> bool:
        return now < self._drove + KEPT_S

    def _most_of_a_client(self, now: float) -> int:
        """Return how many goals of one client may run: the last place is for another one."""
        return max(1, self._places(now) - 1)

    def _plans_that_run(self) -> list[Job]:
        return [job for job in self.running if job.is_plan]

    def _clients_that_run(self) -> Counter[str]:
        """Return the number of running goals of each client."""
        return Counter(job.client for job in self._plans_that_run() if not job.is_driving)

    def _next_goal(self, now: float) -> Job | None:
        """Return the goal that is next; None if none waits, or may run yet.

        The highest level comes first, then the client with the fewest running goals; clients take turns.
        Jobs that run alone keep their place in the queue, and goals do not pass them. Goals of clients
        that have left go to the end, after these jobs too.
        """
        self.goals.sort(key=lambda job: job.client in self.gone)
        end = next(
            (i for i, job in enumerate(self.goals) if job.runs_alone or job.client in self.gone),
            len(self.goals),
        )
        before = self.goals[:end]
        for job in self.goals[end:]:
            job.level = GONE_LEVEL
        running, most = self._clients_that_run(), self._most_of_a_client(now)
        top = max((job.priority for job in before), default=0)
        for job in before:
            job.level = min(top, job.priority + int((now - job.arrival) / AGING_S))
        # The client that had the last turn goes to the back. As jobs keep their places, clients take turns.
        before.sort(key=lambda job: (-job.level, running[job.client], job.client == self._last_client))
        self.goals[:end] = before
        return next((job for job in before or self.goals if running[job.client] < most), None)
