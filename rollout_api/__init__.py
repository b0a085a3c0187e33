"""The API of rollout jobs: what a trainer imports.

It contains the client, the :class:`RolloutJob` manifest, the protocol's messages and the length statistics. Importing
it loads pydantic, redis and msgpack, but nothing heavier such as torch, Ray or vLLM.
"""

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.group_queue import AsyncGroupQueue, Group
from rollout_api.client.groups import GroupOrder, Groups, RolloutsFailedError
from rollout_api.client.history_stats import RewardStats
from rollout_api.client.job_info import JobInfo
from rollout_api.client.prompts import Prompt, Trajectory, partial_of
from rollout_api.client.request_client import RequestClient
from rollout_api.client.step import AsyncStep, StepProgress
from rollout_api.client.sync_client import GroupQueue, RolloutClient, Step
from rollout_api.client.weight_publisher import PublishedWeights
from rollout_api.errors import (
    InvalidRequestError,
    JobChangedError,
    JobEndedError,
    JobFullError,
    JobNotFoundError,
    PauseError,
    RedisRefusedError,
    RedisUnreachableError,
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
    DraftMode,
    FinishReason,
    Partial,
    Pause,
    PauseMode,
    Purpose,
    Refusal,
    Resume,
    Rewards,
    Rollout,
    RolloutId,
    RolloutRequest,
    RoutedExperts,
    UpdateMode,
    WeightsKind,
    WeightSpan,
    WeightUpdate,
    decode,
    encode,
    problem_id_of,
)
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.step_metrics import RolloutSummary, step_metrics
from rollout_api.weights.in_memory import ModelInMemory, TensorsInMemory

__all__ = [
    "AsyncGroupQueue",
    "AsyncRolloutClient",
    "AsyncStep",
    "Cancel",
    "Close",
    "CodecError",
    "CoordinatorStatus",
    "DraftMode",
    "FieldError",
    "FinishReason",
    "Group",
    "GroupOrder",
    "GroupQueue",
    "Groups",
    "InvalidRequestError",
    "JobChangedError",
    "JobEndedError",
    "JobFullError",
    "JobInfo",
    "JobNotFoundError",
    "LengthClass",
    "LengthStats",
    "ManifestError",
    "ModelInMemory",
    "Partial",
    "Pause",
    "PauseError",
    "PauseMode",
    "Prompt",
    "PublishedWeights",
    "Purpose",
    "RedisRefusedError",
    "RedisUnreachableError",
    "Refusal",
    "RequestClient",
    "RequestRefusedError",
    "Resume",
    "RewardStats",
    "Rewards",
    "Rollout",
    "RolloutClient",
    "RolloutClientError",
    "RolloutId",
    "RolloutJob",
    "RolloutJobSpec",
    "RolloutRequest",
    "RolloutSummary",
    "RolloutsFailedError",
    "RoutedExperts",
    "Sampling",
    "Step",
    "StepProgress",
    "TensorsInMemory",
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
    "step_metrics",
]
