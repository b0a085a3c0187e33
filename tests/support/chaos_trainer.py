"""A trainer that may be killed at any moment. When it is restarted, it repeats the step that it was in."""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

from rollout_api import Prompt, RolloutClient

GROUPS, SAMPLES, TOKENS = 8, 4, 260
UPDATE_S = 0.5
"""Simulated duration of the policy update, during which the trainer has no open request."""


def prompts(rank: int, step: int) -> list[Prompt]:
    """Return the prompts of a step, which are the same whenever the step is repeated."""
    tokens = [[(rank + 3 * step + 5 * group + place) % 23 for place in range(6)] for group in range(GROUPS)]
    return [Prompt(one, f"p{group}") for group, one in enumerate(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis")
    parser.add_argument("--uid")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--stop", type=Path, help="End after the step during which this file is created.")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    step = len(options.journal.read_text().splitlines()) if options.journal.exists() else 0
    with RolloutClient.connect(options.redis, uid=options.uid, name=f"rank-{options.rank}", timeout=600) as client:
        while not options.stop.exists():
            with client.step(step, prompts(options.rank, step)) as running:
                rollouts = list(running)
                client.report_rewards({rollout.rollout_id: float(len(rollout.token_ids)) for rollout in rollouts})
                # A step in the journal is complete even if its results are not released, which a later step then does.
                with options.journal.open("a") as journal:
                    done = {rollout.rollout_id: [len(rollout.token_ids), rollout.engine] for rollout in rollouts}
                    journal.write(json.dumps({"step": step, "rollouts": done}) + "\n")
            step += 1
            time.sleep(UPDATE_S)


if __name__ == "__main__":
    main()
