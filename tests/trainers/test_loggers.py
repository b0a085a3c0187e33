"""The training loggers write to the real packages, and the written values are read back.

The tests of W&B and MLflow are skipped where these packages are not installed. They are large, and MLflow requires
older packages than the CPU environment has. The tests also find them in a folder of their own::

    pip install --target /tmp/loggers wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic
    PYTHONPATH=/tmp/loggers pytest tests/trainers/test_loggers.py
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_api.integrations.loggers import (
    CombinedLogger,
    MlflowLogger,
    StepLogger,
    TensorBoardLogger,
    TqdmLogger,
    WandbLogger,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rollout_api import FinishReason, RolloutSummary, StepFigures
from rollout_api.step_figures import metric_names
from tests.support.wandb_files import records


def figures(length: int, reward: float) -> StepFigures:
    """Return the figures of a step of two rollouts, all of which are known and differ with *length*."""
    return StepFigures.from_summaries(
        RolloutSummary(
            problem_id="p",
            num_tokens=length,
            finish_reason=FinishReason.STOP,
            num_decoding_steps=8,
            num_draft_tokens=length,
            num_accepted_tokens=length // 2,
            accepted_by_source={"history": length // 2},
            started_at=1e9,
            finished_at=1e9 + length + sample,
            weight_version=length,
            staleness=1,
            reward=reward * sample,
        )
        for sample in range(2)
    )


STEPS = {0: figures(10, 1.0), 1: figures(20, 0.5), 7: figures(30, 0.0)}
"""Figures by the number of their training step."""


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"{package} is not installed; the module's docstring says how to run this"
    )


def log_steps(logger: StepLogger) -> None:
    for step, logged in STEPS.items():
        logger.log(logged, step)


def scalars(directory: Path) -> dict[int, dict[str, float]]:
    """Return the scalars in TensorBoard's event files by step and name."""
    events = EventAccumulator(str(directory)).Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def test_tensorboard_has_every_figure_of_each_step(tmp_path: Path) -> None:
    with TensorBoardLogger(tmp_path) as logger:
        log_steps(logger)
    found = scalars(tmp_path)
    assert list(STEPS) == sorted(found)
    for step, logged in STEPS.items():
        assert set(metric_names()) == found[step].keys()
        assert logged.metrics() == pytest.approx(found[step])


def test_the_trainers_own_tensorboard_writer_stays_open(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        with TensorBoardLogger(writer) as logger:
            log_steps(logger)
        assert list(STEPS) == sorted(scalars(tmp_path))  # closing the logger has written them
        writer.add_scalar("loss", 0.25, 8)
    assert {"loss": 0.25} == scalars(tmp_path)[8]


def test_tqdm_shows_the_latest_figures() -> None:
    output = io.StringIO()
    with tqdm(range(2), file=output) as bar, TqdmLogger(bar) as logger:
        for step in bar:
            logger.log(STEPS[step], step)
    assert "reward=0.250, length=20, accepted/step=1.25, tail=0%" in output.getvalue()


def test_figures_that_are_unknown_are_not_shown() -> None:
    output = io.StringIO()
    with tqdm(range(1), file=output) as bar:
        for step in bar:
            TqdmLogger(bar).log(StepFigures.from_summaries([]), step)
    assert "=" not in output.getvalue()


def test_combined_loggers_log_to_each(tmp_path: Path) -> None:
    with CombinedLogger(TensorBoardLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b")) as logger:
        log_steps(logger)
    assert list(STEPS) == sorted(scalars(tmp_path / "a"))
    assert scalars(tmp_path / "a") == scalars(tmp_path / "b")


def test_combined_loggers_are_all_closed_even_if_one_fails(tmp_path: Path) -> None:
    class Failing(StepLogger):
        def log(self, figures: StepFigures, step: int) -> None:
            pass

        def close(self) -> None:
            raise OSError("the disk is full")

    for order in (1, -1):
        directory = tmp_path / str(order)
        with (
            pytest.raises(OSError, match="the disk is full"),
            CombinedLogger(*[TensorBoardLogger(directory), Failing()][::order]) as logger,
        ):
            log_steps(logger)
        assert list(STEPS) == sorted(scalars(directory))


@pytest.mark.parametrize(
    ("logger", "module", "message"),
    [
        (WandbLogger, "wandb", r"WandbLogger needs the module wandb, which is not installed: pip install wandb"),
        (MlflowLogger, "mlflow", r"MlflowLogger needs the module mlflow, which is not installed: pip install mlflow"),
        (
            lambda: TensorBoardLogger("runs"),
            "tensorboard",
            r"TensorBoardLogger needs the module tensorboard, .*: pip install tensorboard torch",
        ),
    ],
)
def test_a_missing_package_is_named(logger: Any, module: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError, match=message):
        logger()


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Weights & Biases in its offline mode."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    yield wandb
    wandb.teardown()


def history(directory: Path) -> list[dict[str, Any]]:
    """Return the logged rows of the only offline run in a directory."""
    [file] = directory.glob("wandb/offline-run-*/*.wandb")
    return [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


@needs("wandb")
def test_wandb_has_every_figure_over_the_training_step(wandb: Any, tmp_path: Path) -> None:
    with WandbLogger() as logger:
        log_steps(logger)
    assert wandb.run is None  # the logger has started the run, so it has finished it
    rows = {row["rollout/step"]: row for row in history(tmp_path)}
    assert list(STEPS) == list(rows)
    for step, logged in STEPS.items():
        assert logged.metrics() == {name: rows[step][name] for name in metric_names()}


@needs("wandb")
def test_wandb_keeps_the_trainers_own_axis_and_run(wandb: Any, tmp_path: Path) -> None:
    with wandb.init() as run:
        # As transformers.WandbCallback defines its axis.
        run.define_metric("train/global_step")
        run.define_metric("*", step_metric="train/global_step", step_sync=True)
        with WandbLogger() as logger:
            for step, logged in STEPS.items():
                run.log({"train/global_step": 10 * step, "train/loss": 0.5})
                logger.log(logged, step)
        run.log({"train/global_step": 100, "train/loss": 0.25})
    rows = history(tmp_path)
    losses = [row for row in rows if "train/loss" in row]
    assert [0, 10, 70, 100] == [row["train/global_step"] for row in losses]
    # W&B adds train/global_step to rows whose metrics it is the axis of.
    assert list(STEPS) == [row["rollout/step"] for row in rows if "train/global_step" not in row]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow with a database of its own."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.create_experiment("test", artifact_location=str(tmp_path))
    mlflow.set_experiment("test")
    return mlflow


@needs("mlflow")
def test_mlflow_has_every_figure_of_each_step(mlflow: Any) -> None:
    with MlflowLogger() as logger:
        log_steps(logger)
    assert mlflow.active_run() is None  # the logger has started the run, so it has ended it
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert "FINISHED" == run.info.status
    for name in metric_names():
        found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        assert {step: logged.metrics()[name] for step, logged in STEPS.items()} == pytest.approx(found)


@needs("mlflow")
def test_mlflow_logs_to_the_trainers_active_run(mlflow: Any) -> None:
    with mlflow.start_run() as run:
        with MlflowLogger() as logger:
            log_steps(logger)
        mlflow.log_metric("loss", 0.25, step=8)
    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {**STEPS[7].metrics(), "loss": 0.25} == pytest.approx(metrics)
