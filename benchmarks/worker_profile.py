"""Profiles the worker process of an engine with PyTorch's profiler, and finds where its device waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Interval = tuple[float, float]
"""Begin and end, in microseconds."""

EXECUTE_MODEL = "execute model"
"""The range that contains all other ranges of a step, except for planning."""
_PREFIX = "bench: "
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


class StepProfile(NamedTuple):
    """Mean durations per step, in microseconds."""

    host: dict[str, float]
    """By range of the host's code, without the ranges within it."""
    idle: dict[str, float]
    """Time in which the device was idle, by the range that the host was in; empty without a device."""
    busy: float
    """Time in which the device was busy; 0 without a device."""


class ProfiledWorker:
    """A mixin for vLLM worker extensions; its methods are called with ``collective_rpc``."""

    model_runner: Any
    device: torch.device
    execute_model: Any
    _bench_profile: profile

    def bench_name_ranges(self) -> None:
        """Name the parts of a step; call once, after drafting has started."""
        from rollout_worker.engine.speculator import SampledStep

        scheduling, loop = getattr(self, "_das_scheduling", None), getattr(self, "_das_loop", None)
        _name_range(self, "execute_model", EXECUTE_MODEL)
        _name_range(self.model_runner, "prepare_inputs", "prepare inputs")
        if scheduling is not None:
            _name_range(scheduling, "_schedule_drafts", "schedule drafts")
            _name_range(SampledStep, "wait", "wait for the sampled tokens")
        if loop is not None:
            _name_range(loop, "draft", "draft")
            _name_range(loop, "plan", "plan")
            if scheduling is not None:
                self.model_runner.speculator.on_launched = loop.plan

    def bench_start_profile(self) -> None:
        """Profile what this process does from now on."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._bench_profile = profile(activities=activities)
        self._bench_profile.start()

    def bench_stop_profile(self, path: str) -> None:
        """Write the profile to a file in Chrome's trace format."""
        self._bench_profile.stop()
        self._bench_profile.export_chrome_trace(path)


def _name_range(owner: Any, name: str, range_name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(_PREFIX + range_name):
            return original(*args, **kwargs)

    setattr(owner, name, named)


def analyze(events: Iterable[dict[str, Any]]) -> StepProfile:
    """Return the mean durations of the steps in a trace.

    Args:
        events: the events of a trace in Chrome's format.

    Raises:
        ValueError: if the trace has no step.
    """
    ranges: dict[str, list[Interval]] = {}
    device: list[Interval] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") in _DEVICE_CATEGORIES:
            device.append(interval)
        elif event.get("cat") == "user_annotation" and str(event["name"]).startswith(_PREFIX):
            ranges.setdefault(str(event["name"]).removeprefix(_PREFIX), []).append(interval)
    steps = len(ranges.get(EXECUTE_MODEL, ()))
    if not steps:
        raise ValueError("the profile has no steps")
    owners = _innermost(ranges)
    busy = _union(device)
    gaps = [(end, begin) for (_, end), (begin, _) in pairwise(busy)]
    return StepProfile(
        {name: _length(own) / steps for name, own in owners.items()},
        _by_owner(gaps, owners, steps) if device else {},
        _length(busy) / steps,
    )


def _by_owner(gaps: Sequence[Interval], owners: dict[str, list[Interval]], steps: int) -> dict[str, float]:
    idle = {name: _length(_intersection(gaps, own)) / steps for name, own in owners.items()}
    return {**idle, "elsewhere": _length(gaps) / steps - sum(idle.values())}


def _innermost(ranges: dict[str, list[Interval]]) -> dict[str, list[Interval]]:
    """Return the parts of all ranges that contain no shorter range."""
    taken: list[Interval] = []
    owners = {}
    for name in sorted(ranges, key=lambda name: _length(ranges[name]) / len(ranges[name])):
        own = _union(ranges[name])
        owners[name] = _difference(own, taken)
        taken = _union([*taken, *own])
    return owners


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted intervals that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return what two lists of sorted intervals, each without overlaps, have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the parts of sorted intervals that no interval of another such list covers."""
    if not first:
        return []
    limits = [first[0][0] - 1.0, *(limit for interval in second for limit in interval), first[-1][1] + 1.0]
    outside = [(begin, end) for begin, end in zip(limits[::2], limits[1::2], strict=True) if begin < end]
    return _intersection(first, outside)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
