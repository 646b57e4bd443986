"""What to write into a script so that kept switches become its own: a changed copy and a unified diff.

Only places that the source shows plainly are edited: the call that makes the DataLoader, the statement that makes the
optimizer (and the model that it names), calls of torch's global settings, ``gc.collect()``, the line behind the imports.
Whatever cannot be placed so is left to the reader, in words.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOADER_ARGUMENTS = {
    "workers": (("num_workers", "{value}"), ("persistent_workers", "True")),
    "prefetch": (("prefetch_factor", "{value}"),),
    "persistent_workers": (("persistent_workers", "True"),),
    "pin_memory": (("pin_memory", "True"),),
    "in_order": (("in_order", "False"),),
}
OPTIMIZER_ARGUMENTS = {"fused": (("fused", "True"),), "foreach": (("foreach", "True"),)}
AFTER_IMPORTS = {
    "tf32": "{torch}.backends.{matmul}.matmul.fp32_precision = {torch}.backends.{conv}.conv.fp32_precision = 'tf32'",
    "cudnn_benchmark": "{torch}.backends.cudnn.benchmark = True",
    "threads": "{torch}.set_num_threads({value})",
}
BEFORE_OPTIMIZER = {
    "amp": "{model}.forward = torch.autocast({device!r}, dtype=torch.bfloat16)({model}.forward)",
    "channels_last": "{model}.to(memory_format=torch.channels_last)",
    "compile": "{model}.compile()",
}
BY_HAND = {
    "checkpointing_off": "call the blocks directly instead of torch.utils.checkpoint.checkpoint",
    "no_sync": "run all backward passes of a step but the last under model.no_sync()",
    "huge_pages": "start it with GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
    "allocator": "start it with the variables that perftrain opts names for allocator",
    "sdpa": "with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION): around the forward pass",
}


@dataclass(frozen=True)
class Edited:
    source: str
    diff: str
    by_hand: tuple[str, ...]
    """Switches that could not be written in, and what to do."""


@dataclass(frozen=True)
class _Change:
    """Replace ``source[start:end]`` by ``text``."""

    start: int
    end: int
    text: str


def edit_script(source: str, switches: Sequence[str], name: str, device: str = "cpu") -> Edited:
    """``source`` with ``switches`` (``("amp", "workers=4")``) written into it."""
    tree = ast.parse(source)
    offsets = _offsets(source)
    changes: list[_Change] = []
    left: list[str] = []
    for switch in switches:
        kind, _, value = switch.partition("=")
        found = list(_changes(kind, value, tree, source, offsets, device))
        changes += found
        if not found:
            left.append(f"{switch}: {BY_HAND.get(kind, 'no plain place for it was found in the script')}")
    edited = source
    for change in sorted(changes, key=lambda c: -c.start):
        edited = edited[: change.start] + change.text + edited[change.end :]
    ast.parse(edited)
    diff = "".join(difflib.unified_diff(source.splitlines(True), edited.splitlines(True), f"a/{name}", f"b/{name}"))
    return Edited(edited, diff, tuple(left))


def _offsets(source: str) -> list[int]:
    """Where each line begins."""
    found = [0]
    for line in source.splitlines(True):
        found.append(found[-1] + len(line))
    return found


def _changes(kind: str, value: str, tree: ast.Module, source: str, offsets: list[int], device: str) -> Iterator[_Change]:
    if kind in LOADER_ARGUMENTS:
        for call in _calls(tree, "DataLoader"):
            arguments = [(k, v.format(value=value or 2)) for k, v in LOADER_ARGUMENTS[kind]]
            if _trains(call):
                yield from _with_arguments(call, arguments, source, offsets)
    elif kind in OPTIMIZER_ARGUMENTS:
        for call in _optimizers(tree):
            yield from _with_arguments(call, OPTIMIZER_ARGUMENTS[kind], source, offsets)
    elif kind in BEFORE_OPTIMIZER:
        yield from _before_optimizer(BEFORE_OPTIMIZER[kind], tree, source, offsets, device)
    elif kind == "threads" and (calls := [c for c in _calls(tree, "set_num_threads") if c.args]):
        for call in calls:
            yield _replaced(call.args[0], str(value or "os.cpu_count()"), source, offsets)
    elif kind in AFTER_IMPORTS and (value or kind != "threads"):
        yield from _after_imports(AFTER_IMPORTS[kind], value, tree, source, offsets, device)
    elif kind in ("anomaly_off", "deterministic_off"):
        for call in (*_calls(tree, "set_detect_anomaly"), *_calls(tree, "use_deterministic_algorithms")):
            name = name_of(call.func)
            if (name == "set_detect_anomaly") == (kind == "anomaly_off") and call.args:
                yield _replaced(call.args[0], "False", source, offsets)
    elif kind == "no_gc":
        for statement in ast.walk(tree):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Call)
                and ast.unparse(statement.value.func) == "gc.collect"
            ):
                yield _replaced(statement, "pass", source, offsets)


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and name_of(n.func) == name]


def _trains(call: ast.Call) -> bool:
    """A loader that shuffles or draws from a sampler."""
    return any(k.arg in ("shuffle", "sampler", "batch_sampler") and not _is(k.value, False) for k in call.keywords)


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _optimizers(tree: ast.AST) -> list[ast.Call]:
    """Calls of an optimizer's class: a capitalized name, with parameters of a model among the arguments."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and name_of(n.func)[:1].isupper() and models_of(n)]


def models_of(call: ast.Call) -> list[str]:
    """The models whose ``.parameters()`` are given to a call, as they are written there."""
    calls = [
        n
        for a in call.args
        for n in ast.walk(a)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "parameters"
    ]
    return [ast.unparse(n.func.value) for n in calls if isinstance(n.func, ast.Attribute)]


def _before_optimizer(template: str, tree: ast.AST, source: str, offsets: list[int], device: str) -> Iterator[_Change]:
    """A statement in front of the one that makes the optimizer, for each model that it trains."""
    calls = set(map(id, _optimizers(tree)))
    for statement in ast.walk(tree):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            continue
        inside = [n for n in ast.walk(statement) if id(n) in calls and isinstance(n, ast.Call)]
        models = dict.fromkeys(m for call in inside for m in models_of(call))
        models = [m for m in models if m.replace(".", "").replace("_", "").isalnum()]
        if models:
            start = offsets[statement.lineno - 1]
            indent = source[start : start + statement.col_offset]
            yield _Change(start, start, "".join(f"{indent}{template.format(model=m, device=device)}\n" for m in models))
            return


def _after_imports(template: str, value: str, tree: ast.Module, source: str, offsets: list[int], device: str) -> Iterator[_Change]:
    """A statement of its own behind ``import torch`` and the imports that follow it."""
    imports = (ast.Import, ast.ImportFrom)
    for n, statement in enumerate(tree.body):
        names = [a.asname or a.name for a in statement.names if a.name == "torch"] if isinstance(statement, ast.Import) else []
        if names:
            last = next((i for i in range(n, len(tree.body)) if not isinstance(tree.body[i], imports)), len(tree.body)) - 1
            end = tree.body[last].end_lineno
            assert end is not None
            places = {"matmul": "mkldnn", "conv": "mkldnn"} if device == "cpu" else {"matmul": "cuda", "conv": "cudnn"}
            text = template.format(torch=names[0], value=value, **places)
            start = offsets[end] if end < len(offsets) else len(source)
            newline = "" if source[:start].endswith("\n") else "\n"
            yield _Change(start, start, f"{newline}{text}\n")
            return


def _position(line: int, column: int, source: str, offsets: list[int]) -> int:
    """Offset in characters; ast counts columns in bytes."""
    start = offsets[line - 1]
    text = source[start : offsets[line]] if line < len(offsets) else source[start:]
    return start + len(text.encode()[:column].decode(errors="ignore"))


def _replaced(node: ast.expr | ast.stmt, text: str, source: str, offsets: list[int]) -> _Change:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _Change(
        _position(node.lineno, node.col_offset, source, offsets), _position(node.end_lineno, node.end_col_offset, source, offsets), text
    )


def _with_arguments(call: ast.Call, arguments: Sequence[tuple[str, str]], source: str, offsets: list[int]) -> Iterator[_Change]:
    """Keyword arguments: changed where they stand, added at the end where they do not."""
    standing = {k.arg: k.value for k in call.keywords}
    if None in standing:  # **rest may hold them already
        return
    missing = []
    for key, value in arguments:
        if key in standing:
            yield _replaced(standing[key], value, source, offsets)
        else:
            missing.append(f"{key}={value}")
    last = max([*call.args, *(k.value for k in call.keywords)], key=lambda n: (n.end_lineno, n.end_col_offset), default=None)
    if missing and last is not None:  # behind the last argument, where no comment can swallow it
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        end = _position(last.end_lineno, last.end_col_offset, source, offsets)
        yield _Change(end, end, f", {', '.join(missing)}")
