from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import perftrain_configs


@pytest.fixture
def recipe_yaml() -> Callable[[str], dict[str, Any]]:
    folder = Path(perftrain_configs.__path__[0]) / "recipe"
    return lambda name: yaml.safe_load((folder / f"{name}.yaml").read_text())
