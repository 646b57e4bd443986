"""What the rules ask of the records: from made-up ones with known answers."""

from pathlib import Path

import pytest

from perftrain.diagnose import ranking
from perftrain.diagnose.compute_rules import compute_causes
from perftrain.diagnose.finding import top_function
from perftrain.diagnose.host_rules import host_causes
from perftrain.diagnose.input_rules import input_causes
from perftrain.diagnose.probe import Probe
from perftrain.diagnose.seen import Seen
from perftrain.facts import Bottleneck


def seen(cpu_s: float, ranks: int = 1, **more: object) -> Seen:
    """A hundred steps of 0.1 s, nine tenths backward, of which operations explain next to nothing. ``cpu_s``: in backward."""
    row = [0.0, 1, 1, 0.01, 0.01, 0.01, 0.09, min(0.09, cpu_s), cpu_s]
    operations = [["aten::mul", "float", 2000, 0.01, 0.0, 2000, 0.01, "backward", 1e3]]
    process = {
        "pid": 1, "rows": [row] * 100, "traced": [], "phases": ["forward", "backward"], "counts": {}, "sums": {}, "before": [{}, {}, 0],
        "fetching": {"batches": 0, "samples": 0}, "rss": [], "ranks": ranks, "samples": [],
        "trace": {"steps": 2, "wall_s": 0.2, "operations": operations, "phase_s": {"forward": 0.02, "backward": 0.18}},
    }  # fmt: skip
    return Seen({**process, **more})


def test_whoever_waits_launches_nothing() -> None:
    assert seen(cpu_s=0.09).launch_share == pytest.approx(1.0)
    assert seen(cpu_s=0.01, ranks=2).launch_share == pytest.approx(0.2)


def test_gradients_that_no_optimizer_holds_are_measured() -> None:
    gradients = {"unused_share": 0.1, "unused": ["Judge.0.weight"]}
    trace = {**seen(0.09).trace, "gradients": gradients}
    plain = seen(0.09, trace=trace)
    assert not [c for c in compute_causes(plain) if c.label is Bottleneck.COMPUTE_REDUNDANT]  # a tenth of the gradients: no guess
    measured = Seen(plain.process, probes={"unused_gradients_off": Probe("unused_gradients_off", 1.8, 1.7, 1.9, 8)})
    (found,) = [c for c in compute_causes(measured) if c.label is Bottleneck.COMPUTE_REDUNDANT]
    assert found.upper_bound == pytest.approx(1.8)
    assert found.tries[0].predicted == (1.7, 1.9)


def test_putting_a_saved_file_in_its_place_is_saving(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.replace('a.tmp', 'a')\n")
    row = [0.0, 1, 1, 0.05, 0.05, 0.05, 0.02, 0.02, 0.02, 0.03, 0.0, 0.0]
    rest = ["rest", [[str(script), 2, "<module>"]], [str(script), "<module>"], "", 3.0, 3.0, 0.0]
    training = ["forward", [[str(script), 1, "<module>"]], [str(script), "<module>"], "", 7.0, 0.0, 0.0]
    process = {**seen(0.09).process, "rows": [row] * 100, "phases": ["forward", "checkpoint", "rest"], "samples": [rest, training]}
    (found,) = host_causes(Seen(process))
    assert found.label is Bottleneck.LOOP_CHECKPOINT
    assert found.share == pytest.approx(0.5)
    unsaved = {**process, "rows": [[*row[:6], 0.0, 0.0, 0.0, *row[9:]]] * 100}
    assert [c.label for c in host_causes(Seen(unsaved))] != [Bottleneck.LOOP_CHECKPOINT]


@pytest.mark.parametrize(("new", "persistent"), [(100, False), (0, False), (100, True), (0, True)])
def test_what_keeps_workers_alive(new: int, persistent: bool) -> None:
    """A new loader for each of 100 epochs: only an edit helps. One loader: the switch does, unless it is on."""
    row = [0.0, 1, 1, 0.05, 0.05, 0.05, 0.05, 0.0, 0.0]
    process = {
        **seen(0.09).process, "rows": [row] * 400, "phases": ["forward", "data_wait"],
        "loaders": [{"workers": 2, "persistent": persistent}],
        "counts": {"epochs": 100, "new_loaders": new, "worker_starts": 200 * (new > 0 or not persistent)},
        "sums": {"iter_s": 10.0, "first_batch_s": 8.0}, "fetching": {"batches": 400, "samples": 800},
    }  # fmt: skip
    restarts = [c for c in input_causes(Seen(process)) if c.label is Bottleneck.INPUT_WORKER_RESTART]
    assert bool(restarts) is (new > 0 or not persistent)
    if restarts:
        (offered,) = restarts[0].tries
        assert bool(offered.edit) is (new > 0)
        assert offered.switch == ("" if new else "persistent_workers")


def test_an_update_by_hand_is_the_optimizers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("slow.mul_(0.99).add_(fast, alpha=0.01)\n")
    row = [0.0, 1, 1, 0.06, 0.06, 0.06, 0.04, 0.04, 0.04]
    by_hand = ["rest", [[str(script), 1, "follow"]], [str(script), "follow"], "", 4.0, 0.0, 0.0]
    process = {**seen(0.09).process, "rows": [row] * 100, "phases": ["forward", "rest"], "samples": [by_hand]}
    (found,) = host_causes(Seen(process))
    assert found.label is Bottleneck.OPTIMIZER_STEP
    assert found.share == pytest.approx(0.4)
    assert found.where.endswith("train.py:1")


def test_an_optimizer_of_ones_own_is_to_be_replaced() -> None:
    about = {"class": "Mine", "tensors": 342, "parameters": 10**6, "by_hand": True}
    row = [0.0, 1, 1, 0.06, 0.06, 0.06, 0.04, 0.04, 0.04]
    process = {**seen(0.09).process, "rows": [row] * 100, "phases": ["forward", "optimizer"], "optimizers": [about]}
    (found,) = [c for c in compute_causes(Seen(process)) if c.label is Bottleneck.OPTIMIZER_STEP]
    assert found.upper_bound == pytest.approx(1 / (1 - 0.4 * 0.85))
    assert "fused=True" in found.tries[0].edit


def test_what_the_compiler_gave_up_is_a_graph_break() -> None:
    given_up = {"net.py:46": "Unsupported Tensor.item() call"}
    (found,) = [c for c in compute_causes(seen(0.09, compiling={"given_up": given_up})) if c.label is Bottleneck.COMPILE_GRAPH_BREAK]
    assert found.where == "net.py:46"
    assert found.upper_bound == pytest.approx(1 / (1 - 0.7))


def test_a_forward_pass_that_brings_only_zeros_back_is_unused() -> None:
    calls = [{"module": "Net", "seconds": 0.01, "used": True, "zero": False}] * 2 + [
        {"module": "Net", "seconds": 0.01, "used": False, "zero": True}
    ] * 2
    row = [0.0, 1, 1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05]
    process = {**seen(0.09).process, "rows": [row] * 100, "trace": {**seen(0.09).trace, "forwards": calls}}
    (found,) = [c for c in compute_causes(Seen(process)) if c.label is Bottleneck.COMPUTE_REDUNDANT]
    assert found.share == pytest.approx(0.2)  # 0.02 s forward and as much backward, of 0.2 s
    assert "zero" in found.evidence[0].line


def test_a_loop_over_many_lines_outweighs_the_one_line_that_takes_most() -> None:
    def sample(line: int, function: str, seconds: float) -> list[object]:
        return ["loss" if function == "ndcg" else "forward", [["/w/t.py", line, function]], ["/w/t.py", function], "", seconds, 0.0, 0.0]

    samples = [sample(51, "forward", 4.5), *(sample(20 + n, "ndcg", 0.6 + 0.1 * n) for n in range(6))]
    where, name, share = top_function(seen(0.09, samples=samples), "forward")
    assert (where, name) == ("/w/t.py:25", "ndcg")
    assert share == pytest.approx(5.1 / 9.6)
    assert top_function(seen(0.09), "forward") == ("", "", 0.0)


def test_a_rule_that_breaks_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Seen) -> list[object]:
        raise KeyError("update")

    monkeypatch.setattr(ranking, "host_causes", broken)
    given_up = {"net.py:46": "Unsupported Tensor.item() call"}
    with pytest.warns(RuntimeWarning, match="broke .KeyError: 'update'.: causes may be missing"):
        found = ranking.diagnose(seen(0.09, compiling={"given_up": given_up}))
    assert found.causes[0].label is Bottleneck.COMPILE_GRAPH_BREAK
