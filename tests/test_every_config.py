"""Every YAML composes, builds its object, and says the same as the object's defaults. Found by listing the folders."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import perftrain
from perftrain.opt import all_switches

CONFIGS = Path(perftrain.__file__).parent.parent / "configs"
OPTS = sorted((CONFIGS / "opt").glob("*.yaml"))
SWITCH_FILES = [p for p in sorted((Path(perftrain.__file__).parent / "opt").glob("*.py")) if p.stem not in ("__init__", "base", "seams")]
GROUPS = sorted(p for p in CONFIGS.glob("*/*.yaml"))


def raw(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    """``node`` and the nodes inside it that name a class."""
    return [node, *(n for v in node.values() if isinstance(v, dict) and "_target_" in v for n in nodes(v))]


@pytest.mark.parametrize("path", GROUPS, ids=name_of)
def test_keys_and_values_are_those_of_the_dataclass(path: Path) -> None:
    for node in nodes(raw(path)):
        cls = get_class(node["_target_"])
        assert is_dataclass(cls)
        default = instantiate({"_target_": node["_target_"]}) if cls is not None else None
        here = {k: v for k, v in node.items() if k != "_target_"}
        assert set(here) == {f.name for f in fields(cls)}
        for key, value in here.items():
            if not isinstance(value, dict):
                assert value == getattr(default, key), f"{path}: {key}"
                assert type(value) is type(getattr(default, key)), f"{path}: {key} is {value!r}"


@pytest.mark.parametrize("path", OPTS, ids=name_of)
def test_a_switch_composes_and_builds(path: Path) -> None:
    cfg = composed(f"+opt={path.stem}")
    switch = instantiate(cfg.opt[path.stem])
    assert switch == all_switches()[path.stem]()
    assert list(cfg.opt) == [path.stem]


@pytest.mark.parametrize("path", [p for p in GROUPS if p.parent.name != "opt"], ids=name_of)
def test_a_choice_composes_and_builds(path: Path) -> None:
    cfg = composed(f"{path.parent.name}={path.stem}")
    node = OmegaConf.to_container(cfg[path.parent.name], resolve=True)
    assert node == raw(path)
    assert type(instantiate(node)).__name__ == raw(path)["_target_"].rsplit(".", 1)[-1]


def test_all_switches_compose_together() -> None:
    cfg = composed(f"+opt=[{','.join(p.stem for p in OPTS)}]")
    assert sorted(cfg.opt) == [p.stem for p in OPTS]


@pytest.mark.parametrize("path", OPTS, ids=name_of)
def test_the_header_puts_it_under_its_own_name(path: Path) -> None:
    assert path.read_text().splitlines()[0] == f"# @package opt.{path.stem}"


@pytest.mark.parametrize("path", SWITCH_FILES, ids=lambda p: p.stem)
def test_file_card_and_yaml_have_one_name(path: Path) -> None:
    cls = all_switches()[path.stem]
    assert cls.card.name == path.stem
    assert cls.__module__ == f"perftrain.opt.{path.stem}"
    assert raw(CONFIGS / "opt" / f"{path.stem}.yaml")["_target_"] == f"{cls.__module__}.{cls.__name__}"


def test_no_yaml_without_a_switch() -> None:
    assert [p.stem for p in OPTS] == [p.stem for p in SWITCH_FILES] == list(all_switches())


def test_the_configuration_composes_without_any_override() -> None:
    cfg = composed()
    assert "opt" not in cfg
    assert cfg.recipe._target_.startswith("perftrain_recipes.")
