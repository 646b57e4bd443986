"""Where a training's numbers go besides its record: TensorBoard, MLflow, or anything with ``log`` and ``close``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from perftrain.facts import PerftrainError


class Logger(Protocol):
    """What a ``Trainer`` asks of its loggers. Only rank 0 calls them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values by name after ``step`` steps: ``train/loss``, ``time/forward_s``, ``throughput/samples_per_s``,
        ``evaluation/accuracy``."""
        ...

    def close(self, status: str) -> None:
        """The end of a ``fit``: ``complete``, ``interrupted`` or ``failed``. Another ``fit`` may call :meth:`log` again."""
        ...


class TensorBoard:
    """Scalars in a folder that ``tensorboard --logdir`` shows."""

    def __init__(self, folder: str | Path) -> None:
        _needed("tensorboard", "TensorBoard")
        self.folder = folder
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        """Write out what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow:
    """Metrics of a run of its own, made when the first value comes; your own active run is left alone.

    Args:
        experiment: made where there is none of that name.
        run_name: MLflow finds one if not given.
        tracking_uri: a server or a database; default: what MLflow is set to.

    Raises:
        PerftrainError: the package is missing, or the server or database cannot be reached.
    """

    STATUS = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}  # noqa: RUF012

    def __init__(self, experiment: str = "perftrain", run_name: str | None = None, tracking_uri: str | None = None) -> None:
        _needed("mlflow", "MLflow")
        from mlflow import MlflowClient

        self.experiment, self.run_name = experiment, run_name
        try:
            self._client = MlflowClient(tracking_uri)
            self._client.get_experiment_by_name(experiment)
        except Exception as error:  # a server that is down, a folder that is none, a package that is missing
            raise PerftrainError(
                f"MLflow needs a place that it can reach; {tracking_uri or 'its default'}: {error} "
                "Give one: MLflow(tracking_uri='sqlite:///mlflow.db')"
            ) from error
        self.run_id = ""
        """Empty before the first value."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self.run_id = self.run_id or self._start()
        now_ms = int(1e3 * time.time())
        self._client.log_batch(self.run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def close(self, status: str) -> None:
        """Mark the run as ended."""
        if self.run_id:
            self._client.set_terminated(self.run_id, self.STATUS[status])

    def _start(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(self.experiment)
        return self._client.create_run(experiment_id, run_name=self.run_name).info.run_id


def _needed(package: str, logger: str) -> None:
    """Refuse a logger now whose package would only be missed in the middle of a training.

    Raises:
        PerftrainError: it is not installed.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        raise PerftrainError(
            f"{logger} needs the package {package!r}, which is not installed. Type: pip install 'perftrain[loggers]'"
        ) from None
