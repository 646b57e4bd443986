"""What is installed: the wheel has everything, and asking for help costs nothing."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _loaded(statement: str) -> set[str]:
    """Packages that are loaded after ``statement`` in a fresh process."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}), sep='\\n')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.splitlines())


def test_import_loads_nothing_heavy() -> None:
    assert not _loaded("import perftrain") & {"torch", "hydra", "omegaconf", "rich", "numpy", "scipy"}


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_does_not_load_torch(argument: str) -> None:
    loaded = _loaded(f"from perftrain.cli import main\nassert main(['{argument}']) == 0")
    assert "perftrain" in loaded
    assert "torch" not in loaded


def test_help_of_the_module() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "perftrain", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.startswith("perftrain: ")
    assert not [line for line in run.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]


@pytest.mark.slow
def test_wheel_has_every_module_and_config(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), _sources(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for package, folder in (("perftrain", "perftrain"), ("perftrain_recipes", "recipes"), ("perftrain_configs", "configs"))
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".yaml", ".j2") or file.name == "py.typed"
    }
    assert len(expected) > 50
    assert expected <= packed, f"not in the wheel: {sorted(expected - packed)}"
    strangers = {name for name in packed - expected if ".dist-info/" not in name}
    assert not strangers


def _sources(folder: Path) -> str:
    """A copy to build in, so that the build leaves nothing in the working tree."""
    from shutil import copytree, ignore_patterns

    copy = folder / "sources"
    keep = {".git", "build", "dist", "runs", "tests", "benchmarks"}
    copytree(
        ROOT,
        copy,
        ignore=lambda where, names: keep & set(names) if Path(where) == ROOT else ignore_patterns("__pycache__")(where, names),
    )
    return str(copy)
