# SPDX-License-Identifier: Apache-2.0
"""Evaluations of `edgellm evaluate`: many episodes or bags in worker processes.

    task (bags_task; edgellm_arena/evaluation/task): item -> outcome, the same in every worker and at any time
      |
    spreading: items to do -> workers (local_workers, ray_workers) -> outcomes
      |
    results_file: one JSON line for each item, written by one process
      |
    summary (JSON), table and picture, from the lines of the file only

An item is the seed of an episode, or a bag. An outcome has two parts: `result`, which follows from the item
and the options, and `measured`, times by the clock of the computer that was at work.
"""
