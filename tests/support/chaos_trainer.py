"""A trainer that may be killed at any moment: it goes on with the step that it was in."""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

from rollout_api import Prompt, RolloutClient

GROUPS, SAMPLES, TOKENS = 8, 4, 260
UPDATE_S = 0.5
"""What stands for the optimiser's step, in which the job has nothing to do for this trainer."""


def prompts(rank: int, step: int) -> list[Prompt]:
    """The same for the same step, whoever asks."""
    tokens = [[(rank + 3 * step + 5 * group + place) % 23 for place in range(6)] for group in range(GROUPS)]
    return [Prompt(one, f"p{group}") for group, one in enumerate(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis")
    parser.add_argument("--uid")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--stop", type=Path, help="End after the step in which this file appears.")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    step = len(options.journal.read_text().splitlines()) if options.journal.exists() else 0
    with RolloutClient.connect(options.redis, uid=options.uid, name=f"rank-{options.rank}", timeout=600) as client:
        while not options.stop.exists():
            with client.step(step, prompts(options.rank, step)) as asked:
                rollouts = list(asked)
                client.report_rewards({rollout.rollout_id: float(len(rollout.token_ids)) for rollout in rollouts})
                # a step that is in the journal is over, even if it is not acknowledged: its results are then dropped
                with options.journal.open("a") as journal:
                    done = {rollout.rollout_id: [len(rollout.token_ids), rollout.engine] for rollout in rollouts}
                    journal.write(json.dumps({"step": step, "rollouts": done}) + "\n")
            step += 1
            time.sleep(UPDATE_S)


if __name__ == "__main__":
    main()
