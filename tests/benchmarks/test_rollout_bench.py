"""Tests of the rollout benchmark, with cases whose outcome can be calculated by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.rollout_bench.accelerators import ACCELERATORS, CAPTURED_SIZES, Accelerator
from benchmarks.rollout_bench.comparison import best_rival, compare
from benchmarks.rollout_bench.drafters import TreeDrafter
from benchmarks.rollout_bench.engine import EngineText, FinishedTurn, Noise, Turn
from benchmarks.rollout_bench.job import JobSimulation, Method, StepResult
from benchmarks.rollout_bench.methods import LAUNCHED_FIRST, PREPARED_AFTERWARDS, RIVALS, TREE_TIME
from benchmarks.rollout_bench.vllm_suffix import CORPUS_TOKENS, VllmSuffixDrafter
from benchmarks.rollout_bench.workload import Group, Job, TrainingStep, cut, half_of, loops, make_job
from benchmarks.traces import Segment, Tokens, Trajectory

ACCELERATOR = Accelerator("test", "", 1.0, 0.01, 0.0001, kv_tokens=10_000, layers=1)
SILENT = Noise(0.0, 0.0)
NOTHING = np.empty(0, np.uint32)


def as_tokens(*tokens: int) -> Tokens:
    return np.array(tokens, np.uint32)


def trajectory(problem: str, sample: int, *tokens: int, checkpoint: str = "1", environment: int = 0) -> Trajectory:
    turn = Segment(True, as_tokens(*tokens))
    answer = Segment(False, np.full(environment, 7, np.uint32))
    segments = (turn, answer, turn) if environment else (turn,)
    return Trajectory(problem, sample, checkpoint, as_tokens(1, 2, 3), segments)


def job_of(*steps: list[Trajectory], spares: list[Trajectory] | None = None) -> Job:
    training_steps = []
    for number, rollouts in enumerate(steps):
        problems = dict.fromkeys(rollout.problem for rollout in rollouts)
        groups = [Group(name, tuple(one for one in rollouts if one.problem == name)) for name in problems]
        training_steps.append(TrainingStep(0, number, tuple(groups)))
    by_problem: dict[tuple[str, int], tuple[Trajectory, ...]] = {}
    for spare in spares or []:
        by_problem[spare.problem, 0] = (*by_problem.get((spare.problem, 0), ()), spare)
    return Job(tuple(training_steps), by_problem, 1000)


def simulate(
    job: Job, method: Method, *, engines: int = 1, batch: int = 8, accelerator: Accelerator = ACCELERATOR
) -> list[StepResult]:
    return list(JobSimulation(job, method, accelerator, engines=engines, batch=batch, noise=SILENT).run())


def forward_seconds(tokens: list[int], contexts: list[int]) -> float:
    return sum(ACCELERATOR.forward_s(*step) for step in zip(tokens, contexts, strict=True))


# The workload


def test_halves_are_disjoint_and_rollouts_are_never_spares() -> None:
    samples = [
        trajectory(f"p{problem}", sample, 10 + sample, checkpoint=checkpoint)
        for problem in range(20)
        for checkpoint in ("step_1", "step_2")
        for sample in range(6)
    ]
    jobs = {half: make_job(samples, half, blocks=3) for half in ("tuning", "report")}
    problems = {half: {group.problem for step in job.steps for group in step.groups} for half, job in jobs.items()}
    assert problems["tuning"] | problems["report"] == {f"p{number}" for number in range(20)}
    assert not problems["tuning"] & problems["report"]
    for half, job in jobs.items():
        assert {half} == {half_of(problem) for problem in problems[half]}
        assert [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] == [(step.epoch, step.block) for step in job.steps]
        for step in job.steps:
            for group in step.groups:
                spares = job.spares[group.problem, step.epoch]
                assert (4, 2) == (len(group.rollouts), len(spares))
                assert not {id(one) for one in group.rollouts} & {id(one) for one in spares}
                assert {f"step_{step.epoch + 1}"} == {one.checkpoint for one in (*group.rollouts, *spares)}


def test_cut_keeps_the_environments_answers_between_turns() -> None:
    one = trajectory("p", 0, 10, 11, 12, environment=5)
    assert (3, 4, 6) == tuple(cut(one, limit).generated for limit in (3, 4, 10))
    assert (1, 3, 3) == tuple(len(cut(one, limit).segments) for limit in (3, 4, 10))


def test_loops_are_recognized() -> None:
    random = np.random.default_rng(1).integers(0, 1000, size=4000)
    assert not loops(random)
    assert loops(np.concatenate([random, np.tile(random[:100], 20)]))
    assert not loops(np.tile(random[:10], 20))


# The accelerators


def test_a_7b_model_has_the_step_times_that_das_measured() -> None:
    accelerator = ACCELERATORS["7b-h100"]
    assert pytest.approx(8e-3 + 26e-6) == accelerator.forward_s(1, 0)
    assert pytest.approx(8e-3 + 26e-6 * 128) == accelerator.forward_s(128, 0)


def test_steps_are_padded_to_captured_sizes() -> None:
    accelerator = ACCELERATORS["7b-h100"]
    assert accelerator.forward_s(17, 0) == accelerator.forward_s(24, 0) < accelerator.forward_s(25, 0)
    assert accelerator.forward_s(CAPTURED_SIZES[-1] + 1, 0) < accelerator.forward_s(CAPTURED_SIZES[-1] + 2, 0)


def test_short_steps_wait_for_the_host_without_full_graphs() -> None:
    accelerator = ACCELERATORS["30b-a3b-2xh100"]
    assert accelerator.forward_s(1, 0) < accelerator.forward_s(1, 0, piecewise=True)
    last = CAPTURED_SIZES[-1]
    assert accelerator.forward_s(last, 0) == accelerator.forward_s(last, 0, piecewise=True)
    assert accelerator.forward_s(last, 0) < accelerator.forward_s(last + 1, 0)


def test_a_mixture_of_experts_reads_more_experts_for_more_tokens() -> None:
    accelerator = ACCELERATORS["30b-a3b-2xh100"]
    one, many = accelerator.forward_s(1, 0), accelerator.forward_s(512, 0)
    assert one < 0.35 * accelerator.forward_s(32, 0)
    assert pytest.approx(accelerator.weights_s + accelerator.experts_s + 512 * accelerator.token_s, rel=1e-3) == many


# Engines and jobs


def test_a_rollout_without_drafts_takes_one_step_per_token() -> None:
    [step] = simulate(job_of([trajectory("p", 0, 20, 21, 22)]), Method())
    # The prompt's three tokens are processed in the first step. The fourth sampled token is the end of the turn.
    assert pytest.approx(forward_seconds([3, 1, 1, 1], [3, 4, 5, 6])) == step.seconds
    assert (4, 4, 0) == (step.tokens, step.rollout_steps, step.drafted)


def test_rollouts_wait_for_a_place_and_run_in_parallel_on_two_engines() -> None:
    both = [trajectory("p", 0, 20, 21), trajectory("q", 1, 30, 31)]
    [alone] = simulate(job_of(both[:1]), Method())
    [sequential] = simulate(job_of(both), Method(), batch=1)
    [parallel] = simulate(job_of(both), Method(), batch=2, engines=2)
    assert pytest.approx(2 * alone.seconds) == sequential.seconds
    assert pytest.approx(alone.seconds) == parallel.seconds
    assert [alone.seconds] * 2 == pytest.approx(parallel.ends)


def test_siblings_read_their_prompt_once() -> None:
    [step] = simulate(job_of([trajectory("p", number, 20) for number in range(2)]), Method(), batch=1)
    assert pytest.approx(forward_seconds([3, 1, 1, 1], [3, 4, 3, 4])) == step.seconds


def test_environment_tokens_are_processed_but_not_sampled() -> None:
    [step] = simulate(job_of([trajectory("p", 0, 20, 21, environment=5)]), Method())
    assert 6 == step.tokens
    # The token that ends a turn is processed with the environment's answer.
    assert pytest.approx(forward_seconds([3, 1, 1, 6, 1, 1], [3, 4, 5, 11, 12, 13])) == step.seconds


def test_the_last_rollout_is_preempted_and_completed_when_the_cache_is_full() -> None:
    rollouts = [trajectory("p", number, *range(20, 40)) for number in range(4)]
    [step] = simulate(job_of(rollouts), Method(), accelerator=ACCELERATOR._replace(kv_tokens=40))
    assert step.preempted > 0
    assert 4 == len(step.ends)
    assert 4 * 21 == step.tokens


REPEATING = [trajectory("p", number, *range(10, 70)) for number in range(4)]


# Nothing repeats within a rollout, and the rollouts run one after the other, so that each one can be drafted from those
# before it.
DRAFTING = [name for name in RIVALS if not name.startswith(("none", "bubblespec", "ngram"))]


@pytest.mark.parametrize("name", DRAFTING)
def test_every_method_samples_the_recorded_tokens_and_has_drafts_accepted(name: str) -> None:
    rival = RIVALS[name]
    job = job_of(REPEATING, REPEATING)
    for number, values in enumerate(rival.grid[:1] if name == "suffix-gpu" else rival.grid):
        steps = simulate(job, rival.make(**values, **rival.first_order), batch=1)
        assert [(4, 4 * 61)] * 2 == [(len(step.ends), step.tokens) for step in steps]
        if number == 0:
            assert sum(step.accepted for step in steps) > 61


def _synchronous_s(requests: int) -> float:
    return TREE_TIME(requests) + PREPARED_AFTERWARDS(requests)


@pytest.mark.parametrize(
    ("name", "in_decoding", "with_prompts"),
    [
        ("ngram", lambda _: 0.0, lambda _: 0.0),
        ("vllm-suffix", lambda _: 0.0, lambda _: 0.0),
        ("arctic-inference", _synchronous_s, _synchronous_s),
        ("constant-threshold", LAUNCHED_FIRST, PREPARED_AFTERWARDS),
    ],
)
def test_the_host_adds_time_to_steps_with_drafts(
    name: str, in_decoding: Callable[[int], float], with_prompts: Callable[[int], float]
) -> None:
    rollouts = [trajectory("p", 0, *range(20, 29)), trajectory("q", 0, 100), trajectory("r", 0, 200)]
    method = replace(RIVALS[name].make(**RIVALS[name].grid[0], **RIVALS[name].first_order), longest_first=False)
    [step] = simulate(job_of(rollouts), method, batch=2)
    [free] = simulate(job_of(rollouts), replace(method, host_s=Method().host_s), batch=2)
    # Nothing is drafted for the first step. The third one reads the last prompt; six steps have a single rollout.
    assert pytest.approx(2 * in_decoding(2) + with_prompts(2) + 6 * in_decoding(1)) == step.seconds - free.seconds


def test_ngrams_are_found_in_a_rollouts_own_text() -> None:
    rollout = trajectory("p", 0, *(list(range(10, 30)) * 3))
    [step] = simulate(job_of([rollout]), RIVALS["ngram"].make(max_draft=3, min_ngram=2, longest_first=True))
    assert 61 == step.tokens
    assert step.accepted > 20


def test_only_accepted_tokens_are_verified_if_acceptance_is_known() -> None:
    [step] = simulate(job_of(REPEATING), RIVALS["clairvoyant"].make(), batch=1)
    assert 0 < step.drafted == step.accepted


@pytest.mark.parametrize("name", ["das-rollout-run-ahead", "srt", "bubblespec"])
def test_idle_engines_sample_drafts_for_the_next_training_step(name: str) -> None:
    following = [trajectory("q", number, *range(200, 260)) for number in range(4)]
    spare = trajectory("q", 9, *range(200, 260))
    job = job_of([trajectory("p", 0, *range(10, 130))], following, spares=[spare])
    method = RIVALS[name].make(**RIVALS[name].grid[0], **RIVALS[name].first_order)
    ahead = simulate(job, method, engines=2, batch=8)
    usual = simulate(job, replace(method, runs_ahead=False), engines=2, batch=8)
    assert 61 == ahead[0].run_ahead_tokens
    assert 1 == len(ahead[0].ends)
    assert pytest.approx(usual[0].seconds) == ahead[0].seconds  # the other engine is idle anyway
    assert ahead[1].seconds < 0.8 * usual[1].seconds


def test_the_faster_of_two_copies_counts() -> None:
    # The last rollout repeats itself, which only n-grams use: nothing like it has been sampled before.
    repeating = trajectory("p", 0, *(list(range(10, 60)) * 6))
    job = job_of([repeating, trajectory("q", 0, 5)])
    method = RIVALS["specactor"].make(min_token_prob=0.9, longest_first=True)
    [alone] = simulate(job, replace(method, runs_copies=False), engines=2)
    [copied] = simulate(job, method, engines=2)
    assert 2 == len(copied.ends)
    assert copied.seconds < 0.9 * alone.seconds
    assert copied.tokens > alone.tokens  # the copy's tokens count as work


def test_rollouts_continue_on_the_engine_with_the_fewest_after_each_chunk() -> None:
    rollouts = [trajectory("p", number, *range(10, 14 + (number % 4 == 0) * 300)) for number in range(16)]
    method = Method(chunk_tokens=16, longest_first=False)
    [divided] = simulate(job_of(rollouts), method, engines=4, batch=16)
    assert 16 == len(divided.ends)
    assert 4 * 305 + 12 * 5 == divided.tokens


# vLLM's suffix speculator


def test_vllm_suffix_drafts_what_followed_the_longest_match() -> None:
    text = EngineText(1, 100, 8)
    drafter = VllmSuffixDrafter(text, lambda tokens: 1.0 + 1e-6 * tokens, max_draft=8)
    prompt = as_tokens(1, 2, 3)
    for number, response in enumerate([(5, 6, 7, 8, 9), (4, 6, 7, 30, 31), (5, 6, 7, 8, 10)]):
        drafter.add(FinishedTurn(str(number), "p", prompt, NOTHING, as_tokens(*response), 0), is_own=True)
    text.token_ids[0, :6] = [1, 2, 3, 5, 6, 7]
    text.num_tokens[0] = 3
    drafter.open(0, Turn("r", "p", prompt, NOTHING, NOTHING))
    text.num_tokens[0] = 6
    drafter.draft(np.zeros(1, np.int64), np.zeros(1, np.int64))
    # Two documents match six tokens and agree on 8; the tie after it goes to the newest.
    assert [8, 10] == text.drafts[0, : text.lengths[0]].tolist()


def test_vllm_suffix_prefers_a_longer_match_in_the_own_text() -> None:
    text = EngineText(1, 100, 4)
    drafter = VllmSuffixDrafter(text, lambda tokens: 1.0 + 1e-6 * tokens, max_draft=4)
    drafter.add(FinishedTurn("0", "p", NOTHING, NOTHING, as_tokens(8, 9, 40, 41), 0), is_own=True)
    tokens = [1, 7, 8, 9, 50, 51, 1, 7, 8, 9]
    text.token_ids[0, : len(tokens)] = tokens
    text.num_tokens[0] = len(tokens)
    drafter.open(0, Turn("r", "p", as_tokens(1), NOTHING, NOTHING))
    drafter.draft(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert [50, 51, 1, 7] == text.drafts[0, : text.lengths[0]].tolist()


def test_vllm_suffix_forgets_the_oldest_responses() -> None:
    text = EngineText(1, 100, 4)
    drafter = VllmSuffixDrafter(text, lambda tokens: 1.0, max_draft=4)
    drafter.add(FinishedTurn("0", "p", NOTHING, NOTHING, as_tokens(5, 6, 7, 8, 9), 0), is_own=True)
    text.token_ids[0, :3] = [5, 6, 7]
    text.num_tokens[0] = 3
    drafter.open(0, Turn("r", "p", NOTHING, NOTHING, NOTHING))

    def num_drafted() -> int:
        drafter.draft(np.zeros(1, np.int64), np.zeros(1, np.int64))
        return int(text.lengths[0])

    assert 2 == num_drafted()
    for number in range(2):
        filler = np.random.default_rng(number).integers(10, 30_000, size=CORPUS_TOKENS // 2)
        drafter.add(FinishedTurn(f"filler {number}", "q", NOTHING, NOTHING, filler.astype(np.uint32), 0), is_own=True)
    assert 0 == num_drafted()


def test_vllm_suffix_verifies_nothing_if_a_draft_costs_more_than_it_gains() -> None:
    text = EngineText(1, 100, 4)
    drafter = VllmSuffixDrafter(text, lambda tokens: 10.0**tokens, max_draft=4)
    drafter.add(FinishedTurn("0", "p", NOTHING, NOTHING, as_tokens(5, 6, 7, 8), 0), is_own=True)
    text.token_ids[0, :2] = [5, 6]
    text.num_tokens[0] = 2
    drafter.open(0, Turn("r", "p", NOTHING, NOTHING, NOTHING))
    drafter.draft(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert 0 == text.lengths[0]


def test_a_tree_with_running_rollouts_knows_its_own_rollouts() -> None:
    text = EngineText(1, 100, 8)
    drafter = TreeDrafter(text, per_problem=True)
    turn = FinishedTurn("0", "p", NOTHING, NOTHING, as_tokens(5, 6, 7, 8), 0)
    text.token_ids[0, :2] = [5, 6]
    text.num_tokens[0] = 2
    drafter.open(0, Turn("r", "p", as_tokens(5, 6), NOTHING, NOTHING))
    for is_own in (True, False):
        drafter.add(turn, is_own=is_own)
        drafter.draft(np.zeros(1, np.int64), np.zeros(1, np.int64))
        assert (not is_own) == (text.lengths[0] > 0)


# The comparison


def row(method: str, *seconds: float) -> dict[str, Any]:
    blocks = list(range(len(seconds)))
    return {"method": method, "seconds": list(seconds), "blocks": blocks, "epochs": [0] * len(blocks)}


def test_the_interval_contains_the_ratio_and_depends_on_the_blocks() -> None:
    constant = compare(row("a", 1, 2, 3), row("b", 2, 4, 6))
    assert (0.5, 0.5, 0.5) == pytest.approx(tuple(constant))
    varying = compare(row("a", 1, 4, 3), row("b", 2, 4, 6))
    assert varying.low < 8 / 12 < varying.high


def test_bounds_and_own_methods_are_no_rivals() -> None:
    rows = {
        name: row(name, seconds) for name, seconds in (("clairvoyant", 1), ("das-rollout", 2), ("srt", 4), ("none", 9))
    }
    best = best_rival(rows)
    assert best is not None
    assert "srt" == best["method"]


def test_the_command_writes_figures_and_a_page_and_continues(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(50)} | {"[UNK]": 50}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    random = np.random.default_rng(3)
    with (tmp_path / "trace.jsonl").open("w") as file:
        for problem in range(12):
            for sample in range(6):
                text = " ".join(f"w{(problem + word) % 40}" for word in range(int(random.integers(20, 60))))
                entry = {"problem_id": f"p{problem}", "sample_index": sample, "prompt": "w1 w2", "text": text}
                file.write(json.dumps(entry) + "\n")
    command = [
        *(sys.executable, "-m", "benchmarks.rollout_bench", "--trace", f"small={tmp_path / 'trace.jsonl'}"),
        *("--tokenizer", str(tmp_path / "tokenizer.json"), "--engines", "2", "--batch", "8"),
        *("--methods", "none,vllm-suffix,das-rollout", "--cache", str(tmp_path / "cache")),
        *("--json", str(tmp_path / "results.json"), "--page", str(tmp_path / "page.html")),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Case(" in first
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"none", "vllm-suffix", "das-rollout"} == {one["method"] for one in results["rows"]}
    [ratio] = [one for one in results["figures"] if one["target"] == 1.0]
    assert "vllm-suffix, the fastest rival" == ratio["peer"]
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "das-rollout" in page
    assert "Case(" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    again = [
        *(sys.executable, "-m", "benchmarks.rollout_bench.page", str(tmp_path / "results.json")),
        *("--output", str(tmp_path / "again.html"), "--plots", str(tmp_path / "plots")),
    ]
    subprocess.run(again, capture_output=True, check=True)
    # Result files are rounded, which moves the lines of the plot a little.
    [plot] = (tmp_path / "plots").iterdir()
    assert ("small-7b-h100-8-over-2.svg", "<svg") == (plot.name, plot.read_text()[:4])
    assert page.split("<svg")[0] == (tmp_path / "again.html").read_text().split("<svg")[0]
