"""Run folders: what was written comes back, whoever is killed, races, or writes with a newer version."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from perftrain import store as store_module
from perftrain.facts import SCHEMA, Bottleneck, PerftrainError, RunRecord, StepBreakdown, StepRow
from perftrain.fingerprint import differences, fingerprint, from_json, to_json
from perftrain.store import Store, new_run_id

REPOSITORY = Path(__file__).parents[1]


def a_run(run_id: str = "run-1", **changes: Any) -> RunRecord:
    record = RunRecord(
        run_id=run_id,
        status="complete",
        role="baseline",
        workload={"recipe": "digits", "batch": 64},
        fingerprint="f" * 64,
        settings={"amp": {"dtype": "bfloat16"}},
        environment={"software": {"torch": "2.14.1"}},
        machine={"cpu_model": "a cpu"},
        started="2026-01-01T00:00:00+00:00",
        breakdown=StepBreakdown({"forward": 0.1, "my own, phase": 0.2}, steps=2, samples=128),
        warmup_s=1.5,
        peak_bytes=None,
    )
    return replace(record, **changes)


def some_rows(count: int = 3) -> list[StepRow]:
    return [StepRow(i, {"data_wait": 0.1 * i, "forward": 1 / 3}, samples=64, loss=1 / (i + 1), peak_bytes=1000 + i) for i in range(count)]


def in_python(code: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """A process of its own that has ``a_run``, ``some_rows`` and a ``store`` in the folder given first."""
    prelude = "import os, sys, time, signal\nfrom test_store import *\nstore = Store(Path(sys.argv[1]))\n"
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))
    return subprocess.Popen(
        [sys.executable, "-c", prelude + dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def visible(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.name != ".locks"}


# --- round trips ---
def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "runs")
    record = a_run(metrics={"accuracy": 0.1 + 0.2}, parity_losses={"0": [1.5, 0.1], "1": [math.pi]}, peak_bytes=2**40, reason="é → ü")
    folder = store.save(record, some_rows())
    assert folder == tmp_path / "deep" / "runs" / "run-1"
    assert visible(store.root) == {"run-1"}
    assert {p.name for p in folder.iterdir()} == {"run.json", "steps.csv"}
    assert store.load("run-1") == store.load(folder) == store.load(str(folder)) == record
    assert list(store.load("run-1").breakdown.phase_s) == ["forward", "my own, phase"]
    assert store.load_steps(folder) == store.load_steps("run-1") == some_rows()
    assert json.loads((folder / "run.json").read_text())["schema"] == SCHEMA


def test_nan_and_infinity_survive_strict_json(tmp_path: Path) -> None:
    metrics = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "numpy": np.float32("nan"), "text": "nan"}
    store = Store(tmp_path)
    folder = store.save(a_run(metrics=metrics, parity_losses={"0": [1.0, math.nan]}), [])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    json.loads((folder / "run.json").read_text(), parse_constant=refuse)
    back = store.load(folder)
    assert math.isnan(back.metrics["nan"])
    assert math.isnan(back.metrics["numpy"])
    assert (back.metrics["inf"], back.metrics["minus"], back.metrics["text"]) == (math.inf, -math.inf, "nan")
    assert math.isnan(back.parity_losses["0"][1])


def test_steps_come_back_to_the_last_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    bits = [struct.unpack("d", random.bytes(8))[0] for _ in range(2000)] + [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf]
    finite = [x for x in bits if not math.isnan(x)]
    rows = [StepRow(i, {"data_wait": x, 'odd "name",\n': -x}, samples=i, loss=x) for i, x in enumerate(finite)]
    rows += [StepRow(-1, {}, 0), StepRow(10**12, {"evaluation": 1.0}, 1, loss=math.nan, peak_bytes=2**62)]
    store = Store(tmp_path)
    store.save(a_run(), rows)
    back = store.load_steps("run-1")
    assert math.isnan(back[-1].loss or 0.0)
    assert back[-1].phase_s == {"evaluation": 1.0}
    assert repr(back) == repr(rows)  # repr, because -0.0 == 0.0


def test_the_columns_are_the_phases_in_drawing_order(tmp_path: Path) -> None:
    folder = Store(tmp_path).save(a_run(), [StepRow(0, {"mine": 1.0, "rest": 2.0, "data_wait": 3.0}, 8)])
    assert (folder / "steps.csv").read_text() == "step,samples,loss,peak_bytes,data_wait_s,rest_s,mine_s\n0,8,,,3.0,2.0,1.0\n"


def test_json_takes_enums_paths_and_numpy_scalars_and_refuses_the_rest() -> None:
    value = {"label": Bottleneck.HOST_SYNC, "path": Path("a/b"), "n": np.int64(3), "t": (1, 2), "yes": np.bool_(True)}
    assert from_json(to_json(value)) == {"label": "host.sync", "path": "a/b", "n": 3, "t": [1, 2], "yes": True}
    with pytest.raises(TypeError):
        to_json({"what": object()})


# --- listing ---
@pytest.mark.parametrize("name", ["verdicts", "sweeps", "tune"])
def test_what_lies_beside_the_runs_is_no_broken_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert Store(tmp_path).scan() == ([], [])


def test_runs_are_newest_first_and_broken_folders_are_warnings(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.scan() == ([], [])
    for day in (2, 3, 1):
        store.save(a_run(f"run-{day}", started=f"2026-01-0{day}T00:00:00+00:00"), [])
    store.save_verdict({"decision": "faster"}, "amp")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text('{"schema": 1, "run": {"run_id"')
    (tmp_path / "thin").mkdir()
    (tmp_path / "thin" / "run.json").write_text('{"schema": 1, "run": {"run_id": "thin"}}')
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "run.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a file").write_text("")
    records, warnings = store.scan()
    assert [r.run_id for r in records] == ["run-3", "run-2", "run-1"]
    assert len(warnings) == 4
    for name in ("empty", "half", "thin", "binary"):
        assert any(f"{name}/run.json" in line for line in warnings)


def test_a_missing_run_and_a_bad_name_say_what_to_type(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(PerftrainError, match="perftrain runs --runs"):
        store.load("nothing")
    for name in ("../escape", "", ".hidden", "a/b", "verdicts", "x" * 300):
        with pytest.raises(PerftrainError, match="names a file"):
            store.save(a_run(name), [])
    assert list(tmp_path.iterdir()) == []


def test_broken_steps_name_the_file(tmp_path: Path) -> None:
    folder = Store(tmp_path).save(a_run(), some_rows())
    (folder / "steps.csv").write_text("step,samples,loss,peak_bytes,forward_s\n1,2,3\n")
    with pytest.raises(PerftrainError, match=r"steps\.csv is broken"):
        Store(tmp_path).load_steps(folder)


# --- versions ---
def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.save(a_run(status="interrupted"), some_rows())
    newer = json.dumps({"schema": SCHEMA + 1, "story": "another shape"})
    (folder / "run.json").write_text(newer)
    store.save_verdict({}, "amp")
    (tmp_path / "verdicts" / "amp.json").write_text(newer)
    for attempt in (
        lambda: store.load("run-1"),
        lambda: store.load_steps("run-1"),
        lambda: store.save(a_run(), []),
        lambda: store.verdict("amp"),
        lambda: store.save_verdict({"decision": "faster"}, "amp"),
    ):
        with pytest.raises(PerftrainError, match=rf"has schema {SCHEMA + 1}.*reads up to {SCHEMA}.*Upgrade perftrain.*--runs DIR"):
            attempt()
    assert (folder / "run.json").read_text() == (tmp_path / "verdicts" / "amp.json").read_text() == newer
    assert visible(tmp_path) == {"run-1", "verdicts"}
    assert store.runs() == []
    assert "run-1/run.json" in store.scan()[1][0]


# --- replacing ---
def test_complete_replaces_partial_and_is_never_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(a_run(status="interrupted"), some_rows(1))
    store.save(a_run(status="failed"), some_rows(2))
    store.save(a_run(seconds=7.0), some_rows(3))
    for status in ("complete", "interrupted"):
        with pytest.raises(PerftrainError, match="never overwritten"):
            store.save(a_run(status=status), [])
    assert store.load("run-1").seconds == 7.0
    assert len(store.load_steps("run-1")) == 3
    assert visible(tmp_path) == {"run-1"}


KILLED_AT = [f"{function} {call}" for function, calls in (("mkdir", 2), ("fsync", 2), ("rename", 2)) for call in range(1, calls + 1)]


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_writer_killed_at_any_moment_leaves_a_whole_run(tmp_path: Path, moment: str) -> None:
    """The writer replaces a partial run by a complete one and dies before the given call; afterwards life goes on."""
    store = Store(tmp_path)
    store.save(a_run(status="interrupted"), some_rows(1))
    function, call = moment.split()
    child = in_python(
        """
        real, left = getattr(os, sys.argv[2]), int(sys.argv[3])
        def deadly(*a, **k):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*a, **k)
        setattr(os, sys.argv[2], deadly)
        store.save(a_run(), some_rows(1000))
        """,
        tmp_path,
        function,
        call,
    )
    child.communicate(timeout=30)
    assert child.returncode == -9
    records, warnings = store.scan()
    assert ([r.status for r in records], warnings) == (["interrupted"], [])
    assert store.load_steps("run-1") == some_rows(1)
    store.save(a_run(), some_rows(5))
    assert [r.status for r in store.runs()] == ["complete"]
    assert len(store.load_steps("run-1")) == 5


def test_writers_killed_at_random_leave_nothing_to_trip_over(tmp_path: Path) -> None:
    store = Store(tmp_path)
    child = in_python("for i in range(10**6): store.save(a_run(f'run-{i}'), some_rows(200))", tmp_path)
    while not store.runs():
        time.sleep(0.01)
    time.sleep(0.2)
    child.kill()
    child.communicate(timeout=30)
    records, warnings = store.scan()
    assert records
    assert warnings == []
    assert all(store.load_steps(r.run_id) == some_rows(200) for r in records)


def test_leftovers_of_dead_writers_are_swept_when_old(tmp_path: Path) -> None:
    for name, age_s in (("old", 7200), ("young", 0)):
        (tmp_path / f".saving-{name}").mkdir()
        then = time.time() - age_s
        os.utime(tmp_path / f".saving-{name}", (then, then))
    Store(tmp_path).save(a_run(), [])
    assert visible(tmp_path) == {"run-1", ".saving-young"}


def test_readers_never_see_a_replacement_half_done(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(a_run(status="interrupted"), some_rows(1))
    child = in_python("for i in range(150): store.save(a_run(status='interrupted', seconds=i), some_rows(1))", tmp_path)
    while child.poll() is None:
        assert store.load("run-1").status == "interrupted"
        assert store.scan()[1] == []
    assert child.wait() == 0


# --- baselines and locks ---
def test_the_baseline_is_the_newest_complete_one_with_the_fingerprint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.baseline("f" * 64) is None
    store.save(a_run("old", started="2026-01-01"), [])
    store.save(a_run("new", started="2026-01-02"), [])
    store.save(a_run("other", started="2026-01-03", fingerprint="0" * 64), [])
    store.save(a_run("variant", started="2026-01-03", role="variant"), [])
    store.save(a_run("stopped", started="2026-01-03", status="interrupted"), [])
    found = store.baseline("f" * 64)
    assert found is not None
    assert found.run_id == "new"


def test_run_ids_are_readable_unique_and_valid(tmp_path: Path) -> None:
    ids = {new_run_id("recipes/my net.py", "baseline", "1a2b3c4d5e6f") for _ in range(20)}
    assert len(ids) == 20
    for run_id in ids:
        assert run_id.startswith("recipes_my_net_py-baseline-1a2b3c4d-")
        Store(tmp_path).save(a_run(run_id), [])


def test_two_processes_that_race_record_one_baseline(tmp_path: Path) -> None:
    racer = """
        def waits(holder): print('waited for', holder)
        while not Path(sys.argv[2]).exists(): time.sleep(0.001)
        with store.lock('baseline-' + 'f' * 8, waits):
            if store.baseline('f' * 64) is None:
                time.sleep(0.3)
                store.save(a_run(new_run_id('digits', 'baseline', 'f' * 64)), some_rows())
                print('recorded', os.getpid())
            else:
                print('found it')
    """
    runs, gun = tmp_path / "runs", tmp_path / "gun"
    children = [in_python(racer, runs, gun) for _ in range(2)]
    time.sleep(1.0)
    gun.touch()
    told = sorted((child.communicate(timeout=30)[0] for child in children), key=len)
    winner = told[0].split()[1]
    assert told[0] == f"recorded {winner}\n"
    assert told[1].startswith((f"waited for process {winner} on ", "waited for another process"))  # its name may not be written yet
    assert told[1].endswith("found it\n")
    assert len(Store(runs).runs()) == 1


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    child = in_python("with store.lock('x'): print('held', flush=True); time.sleep(60)", tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    waited: list[str] = []

    def kill_it(holder: str) -> None:
        waited.append(holder)
        child.kill()

    with Store(tmp_path).lock("x", kill_it):
        assert f"process {child.pid}" in waited[0]
    child.communicate()


def test_threads_exclude_each_other_and_a_free_lock_does_not_wait(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        with Store(tmp_path).lock("x"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with Store(tmp_path).lock("x", lambda holder: pytest.fail(holder)):
        pass


# --- verdicts ---
def test_verdicts_are_kept_by_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.verdict("amp,tf32") is None
    store.save_verdict({"speedup": 1.1}, "amp,tf32")
    store.save_verdict({"speedup": math.inf, "ci95": (1.0, 2.0)}, "amp,tf32")
    assert store.verdict("amp,tf32") == {"speedup": math.inf, "ci95": [1.0, 2.0]}
    assert visible(tmp_path / "verdicts") == {"amp,tf32.json"}
    (tmp_path / "verdicts" / "amp,tf32.json").write_text("{")
    with pytest.raises(PerftrainError, match="delete it"):
        store.verdict("amp,tf32")


# --- a disk that refuses ---
def mounted(folder: Path, options: str) -> bool:
    return (
        os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True).returncode == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "size=256k"):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_no_partial_file(small_disk: Path) -> None:
    store = Store(small_disk)
    store.save(a_run("fits"), some_rows(10))
    with pytest.raises(PerftrainError, match=r"disk.*No space left.*\d{6} bytes needed, \d{5,6} bytes free.*--runs DIR"):
        store.save(a_run("too-big"), some_rows(10_000))
    with pytest.raises(PerftrainError, match="No space left"):
        store.save_verdict({"long": "x" * 300_000}, "too-big")
    assert visible(small_disk) == {"fits", "verdicts"}
    assert visible(small_disk / "verdicts") == set()
    assert store.load_steps("fits") == some_rows(10)


def test_a_read_only_disk_can_be_read_and_says_what_to_type(small_disk: Path) -> None:
    store = Store(small_disk)
    store.save(a_run("before"), some_rows())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for attempt in (
        lambda: store.save(a_run("after"), []),
        lambda: store.save_verdict({}, "amp"),
        lambda: store.lock("x").__enter__(),
    ):
        with pytest.raises(PerftrainError, match=r"Read-only file system.*--runs DIR"):
            attempt()
    assert [r.run_id for r in store.runs()] == ["before"]


def test_no_space_without_the_right_to_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(PerftrainError, match="No space left"):
        Store(tmp_path).save(a_run(), some_rows())
    with pytest.raises(PerftrainError, match="No space left"):
        Store(tmp_path).save_verdict({}, "amp")
    assert visible(tmp_path) == {"verdicts"}
    assert visible(tmp_path / "verdicts") == set()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(PerftrainError, match="--runs DIR"):
        Store(tmp_path / "runs").save(a_run(), [])
    assert Store(tmp_path / "runs").runs() == []


# --- fingerprints ---
PARTS = {
    "software": {"torch": "2.14.1", "python": "3.11"},
    "batch": 64,
    "sizes": (1, 2.5),
    "nan": math.nan,
    "on": True,
    "none": None,
}


def test_a_fingerprint_is_the_same_in_every_process_and_order() -> None:
    expected = fingerprint(PARTS)
    assert len(expected) == 64
    assert fingerprint(dict(reversed(PARTS.items()))) == expected
    assert fingerprint(from_json(to_json(PARTS))) == expected
    for seed in ("0", "1"):
        child = in_python("print(fingerprint(PARTS))", "unused", PYTHONHASHSEED=seed)
        assert child.communicate(timeout=30)[0].strip() == expected


def test_differences_name_the_nested_key_and_both_values() -> None:
    assert differences({"software": {"torch": "2.14.1"}}, {"software": {"torch": "2.13.0"}}) == ["software.torch: 2.14.1 → 2.13.0"]
    assert differences({"a": 1, "b": {"c": math.nan}}, {"a": 1, "b": {"c": math.inf}}) == ["b.c: nan → inf"]
    assert differences({"x": [1, 2]}, {"x": [1, 3, 4]}) == ["x[1]: 2 → 3", "x[2]: absent → 4"]
    assert differences({"x": 1}, {"x": "1"}) == ['x: 1 → "1"']
    assert differences({"x": 1}, {}) == ["x: 1 → absent"]
    assert differences(PARTS, PARTS) == differences(PARTS, from_json(to_json(PARTS))) == []


def test_there_are_differences_exactly_where_fingerprints_differ() -> None:
    values = [
        1,
        1.0,
        True,
        "1",
        "true",
        None,
        "null",
        math.nan,
        "nan",
        math.inf,
        [],
        {},
        [1],
        {"y": 1},
        {"y": [1]},
        "absent",
        "[]",
    ]
    cases: list[dict[str, Any]] = [{}, *({"x": value} for value in values)]
    for a in cases:
        for b in cases:
            assert (differences(a, b) == []) == (fingerprint(a) == fingerprint(b)), (a, b)


def test_the_store_does_not_bring_torch_in() -> None:
    child = in_python("print('torch' in sys.modules)", "unused")
    assert child.communicate(timeout=30)[0] == "False\n"
