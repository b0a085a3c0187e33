"""A trainer's session with a job, for an environment that has the client's distribution alone.

Run ``python client_session.py REDIS_URL JOB WEIGHTS``. The program prints what it has received as JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

import rollout_api
from rollout_api import RolloutClient

NEED_MORE_PACKAGES = {"rollout_api.arrays", "rollout_api.http_server"}


def import_modules() -> None:
    """Import every module, except for the adapters, each of which needs its trainer, and those that need
    NumPy or an HTTP server."""
    for module in pkgutil.walk_packages(rollout_api.__path__, "rollout_api."):
        if not module.name.startswith("rollout_api.integrations.") and module.name not in NEED_MORE_PACKAGES:
            importlib.import_module(module.name)


def main(url: str, job: str, weights: str) -> None:
    """Publish weights, ask for a step, report rewards, and print what the job answered."""
    import_modules()
    with RolloutClient.connect(url, job, name="rank-0") as client:
        client.publish_weights(1, weights)
        [group] = client.generate([[1, 2, 3]], step=1, n=2, logprobs=True, problem_ids=["problem"])
        client.report_rewards({rollout.rollout_id: 0.5 for rollout in group})
        lengths = client.length_stats("problem")
    report = {
        "location": rollout_api.__file__,
        "tokens": [rollout.token_ids for rollout in group],
        "ends": [f"{rollout.finish_reason}" for rollout in group],
        "mean_length": lengths.mean,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
