"""How a job tells its state: the coordinator's status, a JSON document, and exit codes of the command ``rollout``.

The operator derives the reason of a failed pod from the exit code.
"""

from __future__ import annotations

from typing import TypedDict, cast

EXIT_MANIFEST = 2
"""The manifest is invalid."""
EXIT_REDIS = 3
"""Redis is unreachable or cannot be used."""
EXIT_ENGINE = 4
"""vLLM, Ray or the job has failed."""
EXIT_STATE = 5
"""A file or the state directory cannot be used."""
EXIT_DEADLINE = 6
"""The job has exceeded ``lifecycle.activeDeadlineSeconds``."""
EXIT_MODEL = 7
"""The model does not exist or cannot be loaded."""
EXIT_INTERRUPTED = 130
"""The command was interrupted."""


class EngineEntry(TypedDict):
    """One engine in the coordinator's status, according to its last report."""

    id: str
    name: str
    worker: str
    """Name of its worker."""
    version: int
    """Weight version that it serves."""
    non_speculative: bool
    """Whether it runs without speculation for requests that want no drafts."""
    speculation_disabled: bool
    """Whether it runs without speculation because drafting did not pay."""
    draining: bool
    max_running: int
    assigned: int
    """Number of assigned rollouts."""
    tokens_per_second: float
    """Tokens that it has sampled per second, over the last seconds."""
    idle_seconds: float
    """Seconds since it last had a rollout."""
    failed: dict[str, str]
    """Weight versions that it could not load, with the reasons."""
    counters: dict[str, float]
    """Its statistics by name, those of ``rollout_engine_*`` metrics."""
    labeled_counters: dict[str, dict[str, int]]
    """Its numbers of draft tokens by name and label, those of ``rollout_engine_*`` metrics with a further label."""


BRIEF_ENGINE_FIELDS = ("worker", "max_running", "assigned", "idle_seconds")
"""Fields of each engine in the answer to ``GET /status?engines=brief``, by which the operator asks."""


class EnvironmentErrors(TypedDict):
    """Rollouts of a dataset source that got no reward for one type of reason."""

    count: int
    """Number of rollouts."""
    problem: str
    """Problem of the first of them."""
    message: str
    """What has happened there."""


class CoordinatorStatus(TypedDict):
    """The coordinator's status of its job, which it publishes in Redis."""

    job: str
    """``namespace/name`` of the job."""
    uid: str
    coordinator: int
    """Number of the coordinator; each one that takes over has a higher number."""
    state: str
    """``running``, ``paused`` or ``closing``."""
    weight_version: int
    """Weight version that the engines should serve."""
    requests: int
    """Number of open requests."""
    waiting: int
    """Rollouts that are not assigned to an engine."""
    assigned: int
    """Rollouts that are assigned to an engine and have not ended."""
    done: int
    """Rollouts that have ended."""
    total: int | None
    """Number of rollouts in all epochs of a dataset source; None for a job that serves trainers."""
    epoch: int | None
    """Current epoch of a dataset source."""
    tokens: int
    """Response tokens of all rollouts that have ended."""
    decoding_steps: int
    """Decoding steps of these rollouts, as counted by the engines that finished them."""
    draft_tokens: int
    """Draft tokens of these rollouts, counted likewise."""
    accepted_tokens: int
    """Accepted draft tokens of these rollouts, counted likewise."""
    accepted_per_step: float
    saved: float | None
    """Fraction of the decoding time that drafting has saved, by the engines' cost models; None if it is unknown."""
    canaries: int
    """Canaries that were compared with their siblings."""
    drift_e_value: float
    """Evidence that drafting changes the output distribution. It is not expected to grow from 1 while it does not."""
    distribution_drift: bool
    """Whether that evidence has ever reached the alarm threshold."""
    unverified: list[str]
    """Engines whose proposed drafts vLLM does not verify."""
    tokens_per_second: float
    remaining_seconds: float | None
    """Estimated seconds until all open requests are answered, at the current speed; None if it is unknown."""
    work_seconds: float | None
    """The same estimate, if all engines were busy until the end."""
    tail_seconds: float | None
    """Estimated seconds until the longest open rollout ends if it runs from now on; more engines do not shorten it."""
    engines: list[EngineEntry]
    engine_errors: dict[str, str]
    """Engines that cannot start, with the reasons."""
    environment_errors: dict[str, EnvironmentErrors]
    """Rollouts of a dataset source that got no reward from its environment, by type of error: ``exception``,
    ``reward``, ``timeout``, ``memory``, ``exit``, ``sampling`` or ``unavailable``."""
    engines_lost: int
    """Engines that this coordinator has lost."""
    dead_letters: int
    """Messages that this coordinator has moved to the dead letters."""
    conflicts: int
    """Rewards and rollouts that the history has refused because it has the rollout with other tokens: Redis had lost it
    in a crash, and it was sampled again."""
    unread_bytes: dict[str, int]
    """Bytes of the results that each client has not read."""
    slow_clients: list[str]
    """Clients whose rollouts do not start: those with too many unread results, and silent ones while there are
    others."""
    silent_clients: list[str]
    """Clients that have not noticed new results for a minute, and have probably died."""
    blocked: dict[str, int]
    """Client → number of its waiting rollouts that cannot start, because it has too many unread results or is silent,
    or because no engine serves or loads weights that may sample them. They do not count towards
    spec.queue.maxRollouts."""


NO_STATUS = cast(CoordinatorStatus, {})
"""A client's substitute for a status while no coordinator runs."""


class ServedStatus(CoordinatorStatus):
    """The body of the coordinator's ``GET /status``. With ``?engines=brief``, engines have fewer fields."""

    redis_error: str | None
    """Why Redis is unavailable, while the job waits for it."""
