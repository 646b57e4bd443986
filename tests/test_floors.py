"""Imports point down, rooms of one floor do not know each other, switches never know each other. Read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import perftrain

ROOT = Path(perftrain.__file__).parent
TOP = 6
FLOORS = {
    "facts": 0, "fingerprint": 0, "cores": 0, "whole": 0,
    "measure": 1, "data": 1, "store": 1, "loggers": 1,
    "opt": 2,
    "engine": 3, "attach": 3, "diagnose": 3,
    "compare": 4, "scale": 4,
    "report": 5, "tune": 5,
    "cli": TOP,
}  # fmt: skip
CLI = {
    "cli",
    "options",
    "composing",
    "measured",
    "diagnosed",
    "tuned",
    "fronts",
    "gated",
    "nsight",
    "reported",
    "recipe_program",
    "job_entry",
    "__main__",
    "__init__",
}
"""Files of the command line's room; ``__init__`` is the public face, which names everything."""
REPORT_MAY = {"facts", "report"}
SWITCH_MAY = {"perftrain.facts", "perftrain.cores", "perftrain.opt.base", "perftrain.opt.seams"}


def room_of(module: str) -> str:
    """``perftrain.opt.amp`` -> ``opt``; the package itself is the command line's."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return "cli" if name in CLI else name


def imported(source: str, module: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the package in ``source``, also those inside functions and relative ones.

    A bare ``import perftrain`` only asks where the package lies or for its version.
    """
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("perftrain."))
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: -node.level], *([node.module] if node.module else [])]) if node.level else node.module or ""
            if base.split(".")[0] == "perftrain":
                for name in node.names:
                    full = f"{base}.{name.name}"
                    yield node.lineno, full if full in known else base


def modules(root: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(["perftrain", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


def violations(root: Path) -> list[str]:
    """Every rule broken below ``root``, one line each, with file and line."""
    found = []
    all_modules = modules(root)
    for module, path in all_modules.items():
        room, where = room_of(module), path.relative_to(root)
        if room not in FLOORS:
            found.append(f"{where}: the room {room!r} stands on no floor")
            continue
        as_module = f"{module}.__init__" if path.name == "__init__.py" else module
        is_switch = room == "opt" and path.stem not in ("__init__", "base", "seams")
        for line, target in imported(path.read_text(), as_module, set(all_modules)):
            other = room_of(target)
            if FLOORS.get(other, TOP) > FLOORS[room]:
                found.append(f"{where}:{line}: {target} is above")
            elif other != room and FLOORS.get(other, TOP) == FLOORS[room]:
                found.append(f"{where}:{line}: {target} is another room of the same floor")
            if room == "report" and other not in REPORT_MAY:
                found.append(f"{where}:{line}: report sees facts only, not {target}")
            if is_switch and target not in SWITCH_MAY and other != "data":
                found.append(f"{where}:{line}: a switch imports {', '.join(sorted(SWITCH_MAY))} and perftrain.data, not {target}")
    return found


def foreign(path: Path) -> set[str]:
    """Top-level packages that a file imports from outside."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - {"perftrain"}


def toy(root: Path, **files: str) -> Path:
    for name, source in files.items():
        path = root / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return root


def test_imports_point_down_and_rooms_are_strangers() -> None:
    assert violations(ROOT) == []


def test_facts_need_only_the_standard_library() -> None:
    assert foreign(ROOT / "facts.py") <= set(sys.stdlib_module_names)


def test_report_needs_only_rich_jinja_and_the_standard_library() -> None:
    for path in (ROOT / "report").glob("*.py"):
        assert foreign(path) <= set(sys.stdlib_module_names) | {"rich", "jinja2"}, path


def test_the_loop_names_no_switch() -> None:
    targets = {target for _, target in imported((ROOT / "engine/loop.py").read_text(), "perftrain.engine.loop", set(modules(ROOT)))}
    assert {t for t in targets if room_of(t) == "opt"} <= {"perftrain.opt.seams"}


def test_a_climbing_import_is_reported(tmp_path: Path) -> None:
    toy(
        tmp_path,
        measure__in__meter="from perftrain.facts import X\nfrom perftrain.compare.duet import Y\n",
        compare__in__duet="",
        facts="",
    )
    assert violations(tmp_path) == ["measure/meter.py:2: perftrain.compare.duet is above"]


def test_imports_in_functions_and_relative_ones_count(tmp_path: Path) -> None:
    toy(tmp_path, engine__in__loop="def f():\n    from ..compare import duet\n", compare__in__duet="", compare__in____init__="")
    assert violations(tmp_path) == ["engine/loop.py:2: perftrain.compare.duet is above"]


def test_a_neighbour_is_reported(tmp_path: Path) -> None:
    toy(tmp_path, measure__in__meter="from perftrain import store\n", store="")
    assert violations(tmp_path) == ["measure/meter.py:1: perftrain.store is another room of the same floor"]


def test_a_switch_that_knows_another_is_reported(tmp_path: Path) -> None:
    toy(
        tmp_path,
        opt__in__amp="from perftrain.opt.tf32 import TF32\nfrom perftrain.opt.base import Switch\n",
        opt__in__tf32="",
        opt__in__base="",
    )
    assert len(found := violations(tmp_path)) == 1
    assert found[0].startswith("opt/amp.py:1: a switch imports")


def test_a_report_that_measures_is_reported(tmp_path: Path) -> None:
    toy(tmp_path, report__in__html="import perftrain.measure.meter\n", measure__in__meter="")
    assert violations(tmp_path) == ["report/html.py:1: report sees facts only, not perftrain.measure.meter"]
