"""A GRPO training by TRL whose engine drafts, beside the same training without drafts.

    python -m benchmarks.drop_in --json FILE [--seeds 5]

Each training is a process of TRL's ``GRPOTrainer`` with vLLM inside it (``vllm_mode="colocate"``), on the 20 problems
of ``examples/quickstart.yaml``, with eight responses to each in every epoch. For each seed, in turn: without drafts;
with drafts from the engine's memory; and with drafts from a history in Redis, where the trainer is killed in the third
epoch and continued from its checkpoint of the second. The trainings of a seed differ by one environment variable.

Then, with the first seed, the server of the history fails in the third epoch: it is killed, filled, slow by half a
second, or replaced by an empty one. Finally, two engines in two processes share a history. With ``--seeds 0``, this is
all that is measured.

All times are measured: those of vLLM's ``generate``. Drafts change which of the equally distributed responses are
sampled, so rewards are compared as means, by a t test on the differences between the trainings of a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from scipy import stats

from benchmarks.figures import Figure, report, spread
from benchmarks.redis_server import redis_server
from rollout_store.models.model_source import default_cache
from rollout_tools.tiny_model import ensure
from rollout_worker import drafting_args
from tests.support.redis_servers import Server
from tests.support.tcp_proxy import Proxy
from tests.support.user_engine import UserEngine, vllm_on_cpus

ROOT = Path(__file__).parents[1]
EPOCHS = 4
KILLED_EPOCH = 3
PROBLEMS_PER_STEP, SAMPLES = 5, 8
MAX_TOKENS = 512
LEARNING_RATE = 1e-5
CHECKPOINT = "step-1080"
SHARED_CALLS = 20
FAULTS = ("killed", "full", "slow by 500 ms", "replaced by an empty one")
_CALLS = "generations.jsonl"
_DRAFTING = "DAS_DRAFTING"


class Problem(NamedTuple):
    """A problem of reasoning-gym."""

    dataset: Any
    entry: Any


@dataclass(frozen=True)
class Generation:
    """One call of vLLM's ``generate``."""

    epoch: int
    step: int
    seconds: float
    rollouts: int
    tokens: int
    reward: float = 0.0


# The trainer's process


def load_problems() -> list[Problem]:
    """Return the problems of the quickstart job."""
    import reasoning_gym

    source = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["spec"]["source"]["dataset"]
    datasets = [
        reasoning_gym.create_dataset(task["generator"], seed=source["seed"], size=task["problems"], **task["config"])
        for task in source["tasks"]
    ]
    return [Problem(dataset, entry) for dataset in datasets for entry in dataset]


def train(directory: Path, seed: int, *, resume: bool) -> None:
    """Train, and append a line for each generation to a file in *directory*."""
    from tests.support.trl_on_cpu import VARIABLES, install, make_trainer

    os.environ.update(VARIABLES)
    install()
    from reasoning_gym.utils import extract_answer

    problems = {problem.entry["question"]: problem for problem in load_problems()}
    steps_per_epoch = len(problems) // PROBLEMS_PER_STEP
    log = (directory / _CALLS).open("a", buffering=1)
    calls: list[Generation] = []

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            problem = problems[prompt[-1]["content"]]
            answer = extract_answer(completion[0]["content"])
            rewards.append(float(problem.dataset.score_answer(answer, problem.entry) == 1.0))
        call = asdict(calls.pop()) | {"reward": statistics.fmean(rewards)}
        log.write(json.dumps(call) + "\n")
        return rewards

    trainer = make_trainer(
        ensure(default_cache() / "das" / "tiny-qwen3")[0].with_name(CHECKPOINT),
        list(problems),
        reward,
        directory / "trainer",
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=PROBLEMS_PER_STEP,
        num_generations=SAMPLES,
        max_completion_length=MAX_TOKENS,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        seed=seed,
    )
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        outputs = generate(*args, **kwargs)
        seconds = time.perf_counter() - started
        responses = [response for output in outputs for response in output.outputs]
        step = trainer.state.global_step
        tokens = sum(len(response.token_ids) for response in responses)
        calls.append(Generation(1 + step // steps_per_epoch, step, seconds, len(responses), tokens))
        return outputs

    llm.generate = timed_generate
    trainer.train(resume_from_checkpoint=resume)
    (report,) = llm.collective_rpc("das_stats") if _DRAFTING in os.environ else ({},)
    (directory / "stats.json").write_text(json.dumps(report))


# The measurement


@dataclass
class Training:
    """A training that has ended."""

    arm: str
    seed: int
    generations: list[Generation]

    def seconds(self, epoch: int) -> float:
        """Return how long the engine has generated in an epoch."""
        return sum(call.seconds for call in self.generations if call.epoch == epoch)

    def tokens(self, epoch: int) -> int:
        """Return how many tokens it has sampled."""
        return sum(call.tokens for call in self.generations if call.epoch == epoch)

    def speed(self, epoch: int) -> float:
        """Return the tokens per second of generation."""
        return self.tokens(epoch) / self.seconds(epoch)

    @property
    def reward(self) -> float:
        """The mean reward of all epochs."""
        return statistics.fmean(call.reward for call in self.generations)


def read_generations(directory: Path) -> list[Generation]:
    """Return the generations of a training, in order; of those that were repeated after a restart, the last."""
    file = directory / _CALLS
    lines = file.read_text().splitlines() if file.exists() else []
    return list({call.step: call for call in (Generation(**json.loads(line)) for line in lines)}.values())


@contextmanager
def trainer_process(directory: Path, seed: int, history: str | None, *, resume: bool = False) -> Iterator[Any]:
    """Start a training and yield its process; at the end, require that it has succeeded, unless it was killed."""
    environment = {name: value for name, value in os.environ.items() if name != _DRAFTING}
    if history is not None:
        environment[_DRAFTING] = history
    command = [sys.executable, "-m", "benchmarks.drop_in", "--train", str(directory), "--seeds", str(seed)]
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(
            [*command, *(["--resume"] if resume else [])], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            yield process
            code = process.wait()
        finally:
            process.kill()
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"The training has failed with {code}; see {directory / 'log'}.")


def wait_for_calls(process: subprocess.Popen[bytes], directory: Path, calls: int) -> None:
    """Wait until a training has generated so often."""
    while len(read_generations(directory)) < calls:
        if process.poll() is not None:
            raise SystemExit(f"The training has ended too early; see {directory / 'log'}.")
        time.sleep(0.05)


def run_training(arm: str, seed: int, directory: Path, history: str | None, *, restart: bool = False) -> Training:
    """Run a training to its end; with *restart*, kill it in the middle of an epoch and continue it."""
    directory.mkdir(parents=True)
    if restart:
        steps_per_epoch = len(load_problems()) // PROBLEMS_PER_STEP
        with trainer_process(directory, seed, history) as process:
            wait_for_calls(process, directory, (KILLED_EPOCH - 1) * steps_per_epoch + 1)
            process.kill()
    with trainer_process(directory, seed, history, resume=restart):
        pass
    return Training(arm, seed, read_generations(directory))


@contextmanager
def fault_at(fault: str, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Start a Redis server; yield its URL, and a function that lets it fail."""
    with Server(directory) as server:
        proxy = Proxy(server.port)
        make = {
            "killed": server.kill,
            "full": lambda: server.raw_client().config_set("maxmemory", 1),
            "slow by 500 ms": lambda: proxy.delay(0.25),  # in each direction
            "replaced by an empty one": server.restart,
        }
        yield f"redis://127.0.0.1:{proxy.port}", make[fault]
        proxy.close()


def run_with_fault(fault: str, seed: int, directory: Path) -> Training:
    """Run a training whose Redis server fails in an epoch."""
    directory.mkdir(parents=True)
    steps_per_epoch = len(load_problems()) // PROBLEMS_PER_STEP
    with (
        fault_at(fault, directory / "redis") as (url, fail),
        trainer_process(directory, seed, f"{url}/drop-in") as process,
    ):
        wait_for_calls(process, directory, (KILLED_EPOCH - 1) * steps_per_epoch + 1)
        fail()
    return Training(f"Redis {fault}", seed, read_generations(directory))


def measure_sharing() -> list[float]:
    """Return how many seconds after a call of ``generate`` another engine can draft from all of its rollouts."""
    model = ensure(default_cache() / "das" / "tiny-qwen3")[0].with_name(CHECKPOINT)
    with redis_server() as url, vllm_on_cpus(model):
        first, second = (UserEngine(model, **drafting_args(f"{url}/sharing")) for _ in range(2))

        def wait(rollouts: int) -> float:
            """Wait until the second engine has read so many rollouts, and return for how many seconds."""
            started = time.perf_counter()
            while second.stats()["history"]["rollouts"] < rollouts:
                time.sleep(0.005)
            return time.perf_counter() - started

        rollouts = len(second.sample())  # An engine follows the problems that it has sampled.
        wait(rollouts)
        seconds = []
        for _ in range(SHARED_CALLS):
            rollouts += len(first.sample(temperature=1.0))
            seconds.append(wait(rollouts))
        first.close()
        second.close()
    return seconds


def ratios(trainings: dict[tuple[str, int], Training], arm: str, epoch: int) -> list[float]:
    """Return for each seed how many times as long as *arm* the training without drafts has generated in an epoch."""
    return [
        trainings["plain", seed].seconds(epoch) / training.seconds(epoch)
        for (name, seed), training in sorted(trainings.items())
        if name == arm
    ]


def figures_of(trainings: dict[tuple[str, int], Training]) -> list[Figure]:
    """Return the figures of all trainings."""
    figures = []
    peer = "TRL with plain vLLM, the same seed"
    plain = trainings["plain", 0]
    for epoch in range(1, EPOCHS + 1):
        target = 1 / 1.03 if epoch == 1 else 1.3
        value = statistics.median(ratios(trainings, "memory", epoch))
        figures.append(Figure(f"generation, plain / with drafts, epoch {epoch}", value, "x", peer, ">=", target))
    redis = [training for (arm, _), training in trainings.items() if arm == "redis"]
    for epoch in range(1, EPOCHS + 1):
        value = statistics.median(ratios(trainings, "redis", epoch))
        name = f"generation, plain / with drafts from Redis, epoch {epoch}"
        if epoch == KILLED_EPOCH:
            name += ", after a restart"
        figures.append(Figure(name, value, "x", peer, ">=", None if epoch == 1 else 1.3))
    after = [one.speed(KILLED_EPOCH) / one.speed(KILLED_EPOCH - 1) for one in redis]
    name = "tokens per second, first epoch after the restart / last before"
    figures.append(Figure(name, statistics.median(after), "x", "", ">=", 1.0))
    for arm in ("memory", "redis"):
        differences = [
            training.reward - trainings["plain", seed].reward
            for (name, seed), training in trainings.items()
            if name == arm
        ]
        figures.append(Figure(f"mean reward, {arm} - plain", statistics.fmean(differences), "", peer, ">=", None))
        if len(set(differences)) > 1:
            p = float(stats.ttest_1samp(differences, 0.0).pvalue)
            figures.append(Figure(f"p-value of equal rewards, {arm}", p, "", peer, ">=", 0.01))
    for fault in FAULTS:
        training = trainings[f"Redis {fault}", 0]
        seconds = sum(map(training.seconds, (KILLED_EPOCH, EPOCHS)))
        ratio = sum(map(plain.seconds, (KILLED_EPOCH, EPOCHS))) / seconds
        name = f"generation, plain / with drafts, epochs {KILLED_EPOCH} and {EPOCHS}, Redis {fault} during the first"
        figures.append(Figure(name, ratio, "x", peer, ">=", 1.0))
        same = [call.rollouts for call in training.generations] == [call.rollouts for call in plain.generations]
        figures.append(Figure(f"equal numbers of rollouts in each step, Redis {fault}", float(same), "", peer, ">=", 1))
    return figures


def print_training(training: Training) -> None:
    """Print how fast a training was."""
    speeds = ", ".join(f"{training.speed(epoch):.0f}" for epoch in range(1, EPOCHS + 1))
    print(f"seed {training.seed}, {training.arm}: {speeds} tokens/s, mean reward {training.reward:.3f}", flush=True)


def main() -> int:
    """Measure, or train in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.seeds, resume=args.resume)
        return 0
    trainings: dict[tuple[str, int], Training] = {}
    with tempfile.TemporaryDirectory(prefix="drop-in-") as work:
        for seed in range(args.seeds):
            arms = ["plain", "memory", "redis"]
            # The order changes, so that none of them always runs beside the same other work.
            for arm in arms[seed % 3 :] + arms[: seed % 3]:
                directory = Path(work) / f"{arm}-{seed}"
                if arm == "redis":
                    with redis_server() as url:
                        training = run_training(arm, seed, directory, f"{url}/drop-in", restart=True)
                else:
                    training = run_training(arm, seed, directory, None if arm == "plain" else "memory")
                trainings[arm, seed] = training
                print_training(training)
        for fault in FAULTS if trainings else ():
            training = run_with_fault(fault, 0, Path(work) / fault)
            trainings[training.arm, 0] = training
            print_training(training)
    sharing = measure_sharing()
    figures = figures_of(trainings) if trainings else []
    name = "seconds until another engine can draft from a rollout"
    figures += [
        Figure(f"{name}, median", statistics.median(sharing), "s", "", "<=", 1.0),
        Figure(f"{name}, maximum", max(sharing), "s", "", "<=", 1.0),
    ]
    report(
        args.json,
        figures,
        measured=True,
        ratios={
            f"{arm}, epoch {epoch}": spread(ratios(trainings, arm, epoch))
            for arm in ("memory", "redis")
            for epoch in range(1, EPOCHS + 1)
            if trainings
        },
        trainings=[asdict(training) for training in trainings.values()],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
