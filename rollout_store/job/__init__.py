"""A job's state in Redis, as its coordinator, engines, relay and launchers read and write it.

Only the classes of this package touch the Redis keys of a job. They decide nothing. Each method is idempotent, so that
it can be repeated when a reply was lost. Those of a :class:`JobStore` repeat themselves while Redis is unreachable or
full; all others, and those of :attr:`JobStore.once`, raise :class:`redis.RedisError` if Redis fails.
"""

from rollout_store.job.assignments import Assignment, Order, OrderKind
from rollout_store.job.engines import EngineReport, LeaseState
from rollout_store.job.part import StaleCoordinatorError
from rollout_store.job.requests import Admission
from rollout_store.job.store import JobStore
from rollout_store.job.streams import Entry, RolloutEvent, Stream, arrival_time
from rollout_store.job.timeline import RolloutProgress

__all__ = [
    "Admission",
    "Assignment",
    "EngineReport",
    "Entry",
    "JobStore",
    "LeaseState",
    "Order",
    "OrderKind",
    "RolloutEvent",
    "RolloutProgress",
    "StaleCoordinatorError",
    "Stream",
    "arrival_time",
]
