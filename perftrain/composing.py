"""From a command line to Hydra configurations, and what to say when there is none."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from perftrain.facts import PerftrainError
from perftrain.options import Line, as_overrides


def config_dir() -> str:
    """Where the configs lie: beside the installed packages, or in the repository."""
    spec = importlib.util.find_spec("perftrain_configs")
    if spec is None or spec.origin is None:
        raise PerftrainError("The package perftrain_configs is missing: perftrain is not installed. Try: pip install -e .")
    return str(Path(spec.origin).parent)


def check(line: Line) -> list[Any]:
    """Compose every configuration that the line asks for.

    Raises:
        PerftrainError: a name or key that does not exist (with the nearest ones), or an override that cannot be read.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    composed = []
    for overrides in _combinations(as_overrides(line), line.multirun):
        try:
            with initialize_config_dir(config_dir(), version_base="1.3"):
                composed.append(compose("config", overrides))
            OmegaConf.to_container(composed[-1], resolve=True)
        except InterpolationResolutionError as error:
            raise PerftrainError(f"{str(error).splitlines()[0]}. --cfg job shows every key that ${{...}} can name.") from None
        except TypeError:
            if not any("[[" in override for override in overrides):
                raise
            raise PerftrainError("A list of switches is flat: +opt=[amp,channels_last].") from None
        except HydraException as error:
            raise PerftrainError(_explain(error, partial(_keys, overrides))) from None
        except ValueError as error:  # a number where the name of a choice belongs
            raise PerftrainError(f"{error}. Quote a name that reads like a number; --cfg job shows every key.") from None
    if "--config-dir" not in line.flags:  # own configs may have groups of their own
        with initialize_config_dir(config_dir(), version_base="1.3"):
            plain = {str(key) for key in compose("config")}
        for one in composed:
            _check_groups({str(key) for key in one}, plain)
    return composed


def _check_groups(seen: set[str], plain: set[str]) -> None:
    """Refuse what a plus would add beside the known groups, where nothing reads it, and what a tilde took away."""
    known = plain | {"opt"}
    if unknown := sorted(seen - known):
        hint = _did_you_mean(difflib.get_close_matches(unknown[0], known, 1))
        raise PerftrainError(f"There is no group or key {unknown[0]!r}. {hint}There are: {', '.join(sorted(known))}.")
    if missing := sorted(plain - seen):
        raise PerftrainError(f"{missing[0]} cannot be left out. Type {missing[0]}=... for another choice; --cfg job shows them all.")


def _keys(overrides: list[str]) -> list[str]:
    """Every key of the configuration with this line's groups chosen, as far as they can be."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    def dotted(node: Any, prefix: str) -> list[str]:
        inner = [f for k, v in node.items() for f in [f"{prefix}{k}", *(dotted(v, f"{prefix}{k}.") if isinstance(v, dict) else [])]]
        return [key for key in inner if not key.endswith("_target_")]

    for chosen in ([o for o in overrides if o.startswith(("recipe=", "+opt=", "hydra.searchpath="))], []):
        try:
            with initialize_config_dir(config_dir(), version_base="1.3"):
                return dotted(OmegaConf.to_container(compose("config", chosen)), "")
        except HydraException:
            continue
    return []


def _combinations(overrides: list[str], multirun: bool) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        if not multirun:
            return [overrides]
        return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]
    except HydraException as error:
        raise PerftrainError(_explain(error)) from None


def _explain(error: Exception, keys: Callable[[], list[str]] = list) -> str:
    """Hydra's error in one or two lines, with the nearest names."""
    options = getattr(error, "options", None)
    missing = getattr(error, "missing_cfg_file", None)
    in_list = re.search(r"Could not load '(\w+/[^']+)'", str(error))
    if in_list and not options:
        missing = in_list[1]
        options = [f.stem for f in (Path(config_dir()) / missing.rpartition("/")[0]).glob("*.yaml")]
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown and "defaults list" not in str(error):
        known = keys()
        beside = [k for k in known if k.rpartition(".")[0] == unknown[1].rpartition(".")[0]]
        near = difflib.get_close_matches(unknown[1], beside, 1) or difflib.get_close_matches(unknown[1], known, 3)
        hint = _did_you_mean(near)
        return f"There is no key {unknown[1]!r}. {hint}There are: {', '.join(beside) or 'none beside it'}; --cfg job shows every key."
    if options and missing:
        group, _, name = str(missing).rpartition("/")
        near = difflib.get_close_matches(name, options, 3, 0.4)
        hint = _did_you_mean(near)
        kind = {"opt": "switch", "recipe": "recipe"}.get(group, f"choice for {group}")
        return f"There is no {kind} {name!r}. {hint}There are: {', '.join(sorted(options))}."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.__cause__ is not None:
        lines += [line.strip() for line in str(error.__cause__).splitlines()[:1]]
    text = " ".join(lines)
    return f"{text}{'' if text.endswith('.') else '.'} --cfg job shows every key; a group that has no choice yet takes a plus: +opt=amp."


def _did_you_mean(near: list[str]) -> str:
    return f"Did you mean {' or '.join(near)}? " if near else ""
