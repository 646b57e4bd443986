"""Python runs this at its start when this folder stands first in PYTHONPATH: the way into a script that is not edited.

The program's own ``sitecustomize``, which this one hides, is run first. Then, if perftrain asked for it, torch is watched for.
"""

import os
import sys


def _run_hidden() -> None:
    """The ``sitecustomize`` that would have run without this folder."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


try:
    _run_hidden()
finally:
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    if os.environ.get("PERFTRAIN_ATTACH"):
        from perftrain.attach.arrival import wait_for_torch

        wait_for_torch()
