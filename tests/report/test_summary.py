"""The figures at the top of a report, and the sentences about what stands out."""

from __future__ import annotations

import pytest

from rollout_worker.report.analysis.summary import findings as findings_of
from rollout_worker.report.analysis.summary import summarize
from rollout_worker.report.recording import JobRecording
from tests.support.recordings import START, ended, engine, measurement, recording, small_job


def findings(job: JobRecording) -> list[str]:
    return findings_of(job, summarize(job))


def test_the_summary_counts_the_training_steps_alone() -> None:
    rollouts = [
        ended(tokens=100, finished_at=START + 10),
        ended(request_id="plain", purpose="eval", draft_mode="off", step=9, tokens=100, finished_at=START + 16),
    ]
    summary = summarize(recording(rollouts))
    assert (1, 1, 100, 10.0, 10.0) == (
        summary.num_steps,
        summary.num_rollouts,
        summary.num_tokens,
        summary.seconds,
        summary.tokens_per_second,
    )
    assert 1.0 == summary.accepted_per_step
    assert summary.measured_saving == pytest.approx(1 - 10 / 16)
    assert summary.estimated_saving is None


def test_the_estimated_saving_comes_from_the_cost_model() -> None:
    measured = [measurement(5, [engine(timed_seconds=4.0, timed_seconds_without_drafts=5.0)])]
    assert summarize(recording([ended()], measurements=measured)).estimated_saving == pytest.approx(0.2)


def test_a_job_without_training_is_summarized_by_its_evaluation() -> None:
    assert 1 == summarize(recording([ended(purpose="eval")])).num_rollouts


def test_what_stands_out_is_said() -> None:
    text = "\n".join(findings(small_job()))
    assert "With drafts, they took 37% less time in total." in text
    assert "Drafting was disabled for 19% of the time in which engine-0 had rollouts" in text
    assert "The mean reward went from 0.25 to 0.81." in text


def test_idle_engines_failures_long_tails_and_interruptions_are_said() -> None:
    rollouts = [
        *[ended(sample=sample) for sample in range(7)],
        ended(sample=7, finish_reason="length", engine="engine-1-x", started_at=START + 9, finished_at=START + 30),
        ended(sample=8, finish_reason="failed", engine=""),
    ]
    measured = [
        measurement(time, [engine(), engine("engine-1", version=1 + (time >= 10), weights_gap_seconds=9.0)])
        for time in (0, 2, 6, 10, 20, 100)
    ]
    text = "\n".join(findings(recording(rollouts, measurements=measured)))
    assert "engine-0 was idle for 10 s (10% of its time) although rollouts were waiting." in text
    assert "engine-0 was idle for 90 s (90% of its time) while other engines finished" in text
    assert "engine-1 was idle for 6.0 s (6% of its time) although rollouts were waiting." in text
    assert "Rollouts that failed: 1." in text
    assert "11% of the rollouts were cut off at max_tokens." in text
    assert "The longest tail took 93% of step 1: for 28 s" in text
    assert "The job was interrupted for 80 s" in text


def test_an_unremarkable_job_has_nothing_that_stands_out() -> None:
    assert [] == findings(recording([ended(), ended(sample=1)]))


def test_an_acceptance_that_stays_at_zero_is_not_mentioned() -> None:
    rollouts = [ended(step=step, draft_tokens=0, accepted_tokens=0, decoding_steps=10) for step in (0, 1)]
    assert not [sentence for sentence in findings(recording(rollouts)) if "Accepted" in sentence]
