"""The contract between a rollout job and everything that talks to it.

What a trainer imports: the client, the :class:`RolloutJob` manifest, the messages on the wire and the Redis keys.
Importing this package loads pydantic, redis and msgpack and nothing heavier.
"""

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.groups import Groups
from rollout_api.client.job_info import JobInfo
from rollout_api.client.prompts import Prompt, partial_of
from rollout_api.client.step import AsyncStep, Progress
from rollout_api.client.sync_client import RolloutClient, Step
from rollout_api.client.trajectory import Trajectory
from rollout_api.client.weight_publisher import PublishedWeights
from rollout_api.errors import (
    InvalidRequestError,
    JobChangedError,
    JobEndedError,
    JobNotFoundError,
    NameInUseError,
    RedisAwayError,
    RedisRefusedError,
    RequestRefusedError,
    RolloutClientError,
    UnreadableResultError,
    VersionMismatchError,
    WeightsError,
)
from rollout_api.length_stats import LengthClass, LengthStats
from rollout_api.manifest.rollout_job import (
    FieldError,
    ManifestError,
    RolloutJob,
    RolloutJobSpec,
    parse_job,
)
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import (
    Cancel,
    Close,
    CodecError,
    Drafts,
    FinishReason,
    Partial,
    Purpose,
    Refusal,
    Rewards,
    Rollout,
    RolloutId,
    RolloutRequest,
    UpdateMode,
    WeightsKind,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
    problem_id_of,
)

__all__ = [
    "AsyncRolloutClient",
    "AsyncStep",
    "Cancel",
    "Close",
    "CodecError",
    "Drafts",
    "FieldError",
    "FinishReason",
    "Groups",
    "InvalidRequestError",
    "JobChangedError",
    "JobEndedError",
    "JobInfo",
    "JobNotFoundError",
    "LengthClass",
    "LengthStats",
    "ManifestError",
    "NameInUseError",
    "Partial",
    "Progress",
    "Prompt",
    "PublishedWeights",
    "Purpose",
    "RedisAwayError",
    "RedisRefusedError",
    "Refusal",
    "RequestRefusedError",
    "Rewards",
    "Rollout",
    "RolloutClient",
    "RolloutClientError",
    "RolloutId",
    "RolloutJob",
    "RolloutJobSpec",
    "RolloutRequest",
    "Sampling",
    "Step",
    "Trajectory",
    "UnreadableResultError",
    "UpdateMode",
    "VersionMismatchError",
    "WeightSpan",
    "WeightUpdate",
    "WeightsError",
    "WeightsKind",
    "decode",
    "encode",
    "parse_job",
    "partial_of",
    "problem_id_of",
]
