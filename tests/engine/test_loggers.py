"""Loggers and the live view's messages: told what was measured, in the meter's rhythm, and never a reason to lose a training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import perftrain.engine.telling as telling_module
from perftrain import MLflow, PerftrainError, TensorBoard, Trainer
from perftrain.facts import Progress
from perftrain.measure.losses import NotFiniteLoss


class Noted:
    """A logger of one's own: two methods are all it takes."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Mapping[str, float]]] = []
        self.closed: list[str] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, values))

    def close(self, status: str) -> None:
        self.closed.append(status)

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.told if name in values]


def trainer(**options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,))), batch_size=8)
    loss_fn = None if "step" in options else cross_entropy
    return Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options)


def test_a_logger_is_told_the_mean_of_the_steps_since_it_was_last_told() -> None:
    noted = Noted()
    fitted = trainer(loggers=[noted], log_every=10, evaluate=lambda _: {"accuracy": 0.5})
    fitted.fit(steps=25, evaluate_every=5)
    rows = fitted.rows
    windows = [rows[:10], rows[10:20], rows[20:]]
    assert [step for step, _ in noted.of("train/loss")] == [10, 20, 25]
    for (_, loss), window in zip(noted.of("train/loss"), windows, strict=True):
        assert loss == pytest.approx(sum(row.loss or 0 for row in window) / len(window))
    for name, phase in (("time/forward_s", "forward"), ("time/data_wait_s", "data_wait"), ("time/evaluation_s", "evaluation")):
        for (_, spent_s), window in zip(noted.of(name), windows, strict=True):
            assert spent_s == pytest.approx(sum(row.phase_s[phase] for row in window) / len(window)), name
    for (_, speed), (_, step_s) in zip(noted.of("throughput/samples_per_s"), noted.of("time/step_s"), strict=True):
        assert speed == pytest.approx(8 / step_s)
    assert noted.of("evaluation/accuracy") == [(n, 0.5) for n in (5, 10, 15, 20, 25)]
    assert noted.closed == ["complete"]


def test_what_logging_takes_is_a_phase_and_nothing_without_loggers() -> None:
    fitted = trainer(loggers=[Noted()], log_every=10)
    fitted.fit(steps=25)
    assert [row.step for row in fitted.rows if row.phase_s["logging"] > 0] == [10, 20]
    bare = trainer()
    bare.fit(steps=130)
    assert "logging" not in bare.rows[0].phase_s
    assert [row.loss for row in bare.rows[:25]] == [row.loss for row in fitted.rows]


def test_fit_again_goes_on_along_the_axis() -> None:
    noted = Noted()
    fitted = trainer(loggers=[noted])
    fitted.fit(steps=7)
    fitted.fit(steps=5)
    assert [step for step, _ in noted.of("train/loss")] == [7, 12]
    assert noted.closed == ["complete", "complete"]


def test_a_training_that_fails_is_logged_until_then() -> None:
    noted = Noted()
    with pytest.raises(NotFiniteLoss):
        trainer(loggers=[noted], step=lambda model, batch: cross_entropy(model(batch[0]), batch[1]) * float("nan")).fit(steps=5)
    assert [step for step, _ in noted.told] == [5]
    assert noted.closed == ["failed"]


def test_a_logger_that_fails_is_left_out_and_the_training_goes_on() -> None:
    class Broken(Noted):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            super().log(step, values)
            raise ConnectionError("server down")

    broken, noted = Broken(), Noted()
    with pytest.warns(RuntimeWarning, match="Broken failed and is left out from here on: ConnectionError: server down"):
        record = trainer(loggers=[broken, noted], log_every=5).fit(steps=20)
    assert record.status == "complete"
    assert len(broken.told) == 1
    assert len(noted.told) == 4


def test_a_rhythm_below_one() -> None:
    with pytest.raises(PerftrainError, match="log_every"):
        trainer(loggers=[Noted()], log_every=0)


@pytest.mark.parametrize(("make", "package"), [(lambda: TensorBoard("x"), "tensorboard"), (MLflow, "mlflow")])
def test_a_missing_package_is_told_before_training(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PerftrainError, match=rf"needs the package '{package}'.*perftrain\[loggers\]"):
        make()


def test_tensorboard_reads_back_what_was_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    noted = Noted()
    fitted = trainer(loggers=[TensorBoard(tmp_path / "tb"), noted], log_every=10, evaluate=lambda _: {"accuracy": 0.25})
    assert not (tmp_path / "tb").exists()
    fitted.fit(steps=30)
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {name for _, values in noted.told for name in values}
    for name in ("train/loss", "time/forward_s", "evaluation/accuracy"):
        assert [(e.step, pytest.approx(e.value)) for e in found.Scalars(name)] == noted.of(name)


def test_mlflow_reads_back_what_was_told(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    place = f"sqlite:///{tmp_path}/mlflow.db"
    noted, logger = Noted(), MLflow("faces", run_name="mine", tracking_uri=place)
    trainer(loggers=[logger, noted], log_every=10).fit(steps=20)
    client = mlflow.MlflowClient(place)
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert [(m.step, m.value) for m in client.get_metric_history(logger.run_id, "train/loss")] == noted.of("train/loss")
    assert set(run.data.metrics) == {name for _, values in noted.told for name in values}


def test_mlflow_without_a_place_is_told_before_training(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "file").write_text("no database")
    with pytest.raises(PerftrainError, match="place that it can reach"):
        MLflow(tracking_uri=f"sqlite:///{tmp_path}/file")


def test_progress_is_told_at_most_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    now = [0.0]
    monkeypatch.setattr(telling_module.time, "monotonic", lambda: now[0])

    def tick(_: int) -> None:
        now[0] += 0.3

    fitted = trainer()
    fitted.fit(steps=20, on_step=tick, on_progress=told.append)
    assert [p.step for p in told] == [4, 8, 12, 16, 20]
    assert [p.breakdown.steps for p in told] == [3, 4, 4, 4, 4]  # the step that is told in is not over
    assert all(p.steps == 20 and p.breakdown.samples == 8 * p.breakdown.steps for p in told)
    assert told[-1].seconds == pytest.approx(6.0)
    assert told[1].loss == fitted.rows[6].loss
    assert told[1].breakdown.step_s == pytest.approx(sum(row.step_s for row in fitted.rows[3:7]) / 4)
