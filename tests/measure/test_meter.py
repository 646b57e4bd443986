"""The meter alone, on a loop that somebody wrote by hand."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from perftrain import Meter
from perftrain.facts import PHASES, PerftrainError, StepRow
from perftrain.measure.losses import NotFiniteLoss
from perftrain.measure.meter import MAX_PHASES, breakdown_of, samples_in
from perftrain.measure.statistics import warmup_cut


class SlowLoader:
    def __init__(self, count: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s

    def __iter__(self):
        for _ in range(self.count):
            time.sleep(self.wait_s)
            yield torch.randn(16, 32), torch.randint(0, 4, (16,))


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return self.linear(x)


def hand_written(meter: Meter, steps: int, stop_at: int | None = None) -> float:
    """The three lines on an ordinary loop; the seconds it took outside."""
    model = SlowModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter.watch(model, optimizer)
    begin = time.perf_counter()
    for step, (x, y) in enumerate(meter.steps(SlowLoader(steps, 0.008))):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == stop_at:
            break
    seconds = time.perf_counter() - begin
    meter.unwatch()
    return seconds


def test_three_lines_tell_the_phases_apart() -> None:
    meter = Meter()
    hand_written(meter, 12)
    now = meter.breakdown(skip=2)
    assert now.steps == 10
    assert now.samples == 160
    assert now.phase_s["data_wait"] == pytest.approx(0.0085, abs=0.0035)
    assert now.phase_s["forward"] == pytest.approx(0.0045, abs=0.003)
    assert now.share("data_wait") > now.share("forward") > now.share("optimizer") > 0
    assert now.phase_s["backward"] > 0
    assert set(now.phase_s) <= set(PHASES)


def test_phases_add_up_to_the_wall_time() -> None:
    meter = Meter()
    seconds = hand_written(meter, 20)
    assert sum(meter.step_s()) == pytest.approx(seconds, rel=0.01)
    assert sum(row.step_s for row in meter.rows()) == pytest.approx(sum(meter.step_s()))


def test_breaking_out_keeps_the_step_in_progress_and_the_meter_goes_on() -> None:
    meter = Meter()
    hand_written(meter, 10, stop_at=3)
    assert len(meter) == len(meter.rows()) == 4
    time.sleep(0.1)  # between two loops: nobody's time
    hand_written(meter, 3)
    assert [row.step for row in meter.rows()] == list(range(7))
    assert max(row.step_s for row in meter.rows()[1:]) < 0.09


def test_an_exception_in_the_loop_passes_through() -> None:
    meter = Meter()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in meter.steps([torch.ones(2)] * 3):
            _ = 1 // 0
    assert len(meter.rows()) == 1


def test_unwatch_leaves_model_and_optimizer_as_they_were() -> None:
    model = SlowModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter()
    meter.watch(model, optimizer)
    meter.unwatch()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_rows_hold_what_was_measured() -> None:
    meter = Meter()
    meter.start()
    for n in range(3):
        meter.lap("forward")
        time.sleep(0.002)
        meter.lap("my own phase")
        meter.end_step(samples=n, losses={"loss": torch.tensor(float(n)), "other": torch.tensor(1.0)} if n else None)
    rows = meter.rows()
    assert [(row.step, row.samples, row.loss) for row in rows] == [(0, 0, None), (1, 1, 1.0), (2, 2, 2.0)]
    assert all(0.002 <= row.phase_s["my own phase"] < 0.02 for row in rows)
    assert set(rows[0].phase_s) == {"forward", "my own phase", "rest"}
    assert meter.losses() == {"loss": [1.0, 2.0], "other": [1.0, 1.0]}


def test_a_long_run_has_every_row() -> None:
    meter = Meter()
    begin = time.perf_counter()
    meter.start()
    for n in range(200):
        meter.lap("forward")
        meter.end_step(1, {"loss": torch.tensor(float(n))})
    seconds = time.perf_counter() - begin
    assert [row.loss for row in meter.rows()] == [float(n) for n in range(200)]
    assert sum(meter.step_s()) <= seconds
    assert meter.rows() == meter.rows()  # reading changes nothing


def test_start_forgets_the_time_since_the_last_step() -> None:
    meter = Meter()
    time.sleep(0.02)
    meter.lap("forward")
    meter.start()
    meter.end_step()
    assert meter.step_s()[0] < 0.01


def test_more_phases_than_fit_are_refused() -> None:
    meter = Meter()
    for n in range(MAX_PHASES - len(PHASES)):
        meter.lap(f"phase {n}")
    meter.end_step()
    assert len(meter.rows()) == 1
    with pytest.raises(PerftrainError, match=r"at most 16 phases; 'one more'"):  # noqa: PT012
        meter.lap("one more")
        meter.end_step()
        meter.rows()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_named(bad: float) -> None:
    meter = Meter(stop_on_nan=True)
    meter.end_step(1, {"loss": torch.tensor(1.0)})
    meter.end_step(1, {"loss": torch.tensor(bad)})
    with pytest.raises(NotFiniteLoss, match="at step 1") as caught:
        meter.finish()
    assert caught.value.step == 1


def test_a_loss_that_is_not_finite_stops_within_64_steps() -> None:
    meter = Meter(stop_on_nan=True)
    with pytest.raises(NotFiniteLoss, match="at step 3"):  # noqa: PT012
        for n in range(100):
            meter.end_step(1, {"loss": torch.tensor(float("nan") if n == 3 else 1.0)})
    assert len(meter) == 64


def test_without_the_check_nan_is_only_recorded() -> None:
    meter = Meter()
    meter.end_step(1, {"loss": torch.tensor(float("nan"))})
    assert meter.rows()[0].loss != meter.rows()[0].loss


def test_an_empty_meter() -> None:
    now = Meter().breakdown()
    assert (now.steps, now.step_s, now.share("forward")) == (0, 0, 0)
    assert Meter().rows() == []


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 10, 101])
def test_warmup_is_at_least_one_step_and_at_most_half(count: int) -> None:
    cut = warmup_cut([0.01] * count)
    assert cut <= max(1, count // 2)
    assert cut >= min(1, max(0, count - 1))


@pytest.mark.parametrize("slow", [1, 3, 8])
def test_warmup_is_found(slow: int) -> None:
    steps = [0.5] * slow + [0.010 + 0.0001 * (n % 5) for n in range(60)]
    assert slow <= warmup_cut(steps) <= slow + 3


def test_breakdown_is_the_mean_after_the_cut() -> None:
    rows = [StepRow(n, {"forward": 1.0 if n == 0 else 0.1, "rest": 0.1}, 4) for n in range(5)]
    now = breakdown_of(rows, skip=1)
    assert now.phase_s == {"forward": pytest.approx(0.1), "rest": pytest.approx(0.1)}
    assert (now.steps, now.samples, now.step_s) == (4, 16, pytest.approx(0.2))
    assert breakdown_of(rows, skip=99).steps == 1


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(5, 2), 5), ((torch.ones(3, 2), torch.ones(3)), 3), ({"a": "name", "x": torch.ones(7)}, 7),
        ([[torch.ones(2)], 1], 2), (torch.tensor(1.0), 1), ("text", 0), ({}, 0),
    ],
)  # fmt: skip
def test_samples_in_any_batch(batch: object, count: int) -> None:
    assert samples_in(batch) == count
