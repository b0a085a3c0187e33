"""The contract between a rollout job and everything that talks to it.

What a trainer imports: the :class:`RolloutJob` manifest, the messages on the wire and the Redis keys.
Importing this package loads pydantic, redis and msgpack and nothing heavier.
"""

from rollout_api.job import (
    FieldError,
    ManifestError,
    RolloutJob,
    RolloutJobSpec,
    Sampling,
    parse_job,
)
from rollout_api.messages import (
    CodecError,
    FinishReason,
    Purpose,
    Rollout,
    RolloutId,
    RolloutRequest,
    WeightSpan,
    decode,
    encode,
    problem_id_of,
)

__all__ = [
    "CodecError",
    "FieldError",
    "FinishReason",
    "ManifestError",
    "Purpose",
    "Rollout",
    "RolloutId",
    "RolloutJob",
    "RolloutJobSpec",
    "RolloutRequest",
    "Sampling",
    "WeightSpan",
    "decode",
    "encode",
    "parse_job",
    "problem_id_of",
]
