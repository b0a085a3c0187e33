"""The analysis of a profile: the device's idle time is attributed to what the host did."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.worker_profile import analyze


def event(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def host(name: str, begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", "bench: " + name, begin, end)


STEPS = [
    host("execute model", 0, 100),
    host("schedule drafts", 0, 40),
    host("draft", 10, 30),
    host("execute model", 200, 280),
    host("schedule drafts", 210, 230),
    event("cpu_op", "aten::add", 50, 60),
    {"ph": "M", "name": "process_name"},
]


def test_the_host_s_time_is_that_of_the_innermost_range() -> None:
    profile = analyze(STEPS)
    assert {"draft": 10.0, "schedule drafts": 20.0, "execute model": 60.0} == profile.host
    assert ({}, 0.0) == (profile.idle, profile.busy)


def test_idle_time_of_the_device_is_attributed_to_the_host_s_ranges() -> None:
    kernels = [
        event("kernel", "attention", 5, 20),
        event("gpu_memcpy", "copy", 15, 25),
        event("kernel", "sample", 60, 190),
        event("kernel", "attention", 220, 300),
    ]
    profile = analyze([*STEPS, *kernels])
    # Idle are 25 to 60 and 190 to 220.
    assert {"draft": 2.5, "schedule drafts": 10.0, "execute model": 15.0, "elsewhere": 5.0} == profile.idle
    assert (20 + 130 + 80) / 2 == profile.busy


def test_a_profile_without_steps_is_rejected() -> None:
    with pytest.raises(ValueError, match="the profile has no steps"):
        analyze([event("kernel", "attention", 0, 1)])
