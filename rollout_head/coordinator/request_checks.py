"""Checks of a request against the job. Pure."""

from __future__ import annotations

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.messages import RolloutRequest
from rollout_store.job.admission_rules import AdmissionError, check_admission


def check_request(
    request: RolloutRequest, size_bytes: int, job: RolloutJob, *, uid: str, vocabulary: int
) -> RolloutRequest:
    """Check whether a job can serve a request.

    Args:
        request: the request as the client sent it.
        size_bytes: size of the encoded request.
        job: the manifest.
        uid: uid of the job.
        vocabulary: number of token ids that the model knows.

    Returns:
        The request, with the job's sampling settings for all that it leaves open.

    Raises:
        AdmissionError: naming the setting that the job cannot serve.
    """
    spec = job.spec
    if request.job_uid != uid:
        raise AdmissionError(f"the request is for job {request.job_uid}, but this is job {uid}; connect again")
    if size_bytes > (limit := int(parse_quantity(spec.queue.max_request_bytes))):
        raise AdmissionError(f"the request has {size_bytes} bytes, but spec.queue.maxRequestBytes is {limit}")
    try:
        request = request.with_defaults(spec.sampling)
    except ValueError as error:
        raise AdmissionError(f"sampling, combined with the job's spec.sampling: {error}") from None
    check_admission(
        request.sampling,
        len(request.prompt_token_ids),
        max_model_len=spec.engine.max_model_len,
        speculative=spec.speculation.policy != "off",
        prefix=request.prefix,
    )
    _check_token_ids(request, vocabulary)
    _check_weight_version(request)
    return request


def _check_token_ids(request: RolloutRequest, vocabulary: int) -> None:
    prefix = request.prefix.token_ids if request.prefix is not None else []
    for name, tokens in (("prompt", request.prompt_token_ids), ("prefix", prefix)):
        for extreme in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= extreme < vocabulary:
                raise _unknown_token(name, extreme, vocabulary)
    for name, token in request.sampling.tokens_outside(vocabulary).items():
        raise _unknown_token(f"sampling.{name}", token, vocabulary)


def _unknown_token(name: str, token: int, vocabulary: int) -> AdmissionError:
    return AdmissionError(
        f"{name}: {token} is not a token of the model, which has {vocabulary}; remove it, or encode the prompt with "
        "the model's tokenizer"
    )


def _check_weight_version(request: RolloutRequest) -> None:
    if request.prefix is None:
        return
    oldest = request.prefix.oldest_weight_version
    if oldest is not None and request.min_weight_version is not None and oldest < request.min_weight_version:
        raise AdmissionError(
            f"min_weight_version is {request.min_weight_version}, but the prefix was sampled with version {oldest}; "
            "lower min_weight_version, or sample the rollout from the beginning"
        )
    if request.weight_version is None:
        return
    others = sorted({span.weight_version for span in request.prefix.weight_spans} - {request.weight_version})
    if others:
        raise AdmissionError(
            f"the request is pinned to weight version {request.weight_version}, but its prefix was sampled with "
            f"version {others[0]}; leave weight_version out, or sample the rollout from the beginning"
        )
