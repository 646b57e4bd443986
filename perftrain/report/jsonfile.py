"""The same facts as printed, as strictly valid JSON: what is not a finite number is null."""

from __future__ import annotations

import json
import math
import numbers
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from perftrain.facts import (
    PHASES,
    ArmSummary,
    Cause,
    Decision,
    Diagnosis,
    Evidence,
    Numerics,
    Parity,
    PerftrainError,
    RunRecord,
    StepBreakdown,
    Verdict,
    breakdown_from,
)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict in the documented shape; :func:`verdict_from_json` is its inverse."""
    return plain(
        {
            **_fields(verdict),
            "parity": _parity_json(verdict.parity),
            "baseline": _arm_json(verdict.baseline),
            "variant": _arm_json(verdict.variant),
        }
    )


def verdict_from_json(raw: Mapping[str, Any]) -> Verdict:
    """The verdict that :func:`verdict_json` wrote; keys of a later version are left out."""
    known = {k: raw[k] for k in Verdict.__dataclass_fields__ if k in raw}
    return Verdict(
        **{
            **known,
            "switches": tuple(raw["switches"]),
            "decision": Decision(raw["decision"]),
            "ci95": None if raw.get("ci95") is None else tuple(map(_number, raw["ci95"])),
            "parity": _parity_from(raw.get("parity")),
            "baseline": _arm_from(raw.get("baseline")),
            "variant": _arm_from(raw.get("variant")),
            "notes": tuple(raw.get("notes", ())),
        }
    )


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis in the documented shape, its causes ranked."""
    return plain(
        {
            "healthy": diagnosis.healthy,
            "sentence": diagnosis.sentence,
            "breakdown": breakdown_json(diagnosis.breakdown),
            "causes": [_cause_json(cause) for cause in diagnosis.causes],
            "memory": diagnosis.memory,
            "roofline": diagnosis.roofline,
        }
    )


def run_json(record: RunRecord) -> dict[str, Any]:
    """A run, readable by :func:`perftrain.facts.run_record_from`."""
    return plain({**_fields(record), "breakdown": breakdown_json(record.breakdown)})


def breakdown_json(breakdown: StepBreakdown) -> dict[str, Any]:
    """A step with its phases in seconds, and each as a share (``data_wait_share``) of ``step_s``."""
    phases = dict.fromkeys((*PHASES, *breakdown.phase_s))
    shares = {f"{phase}_share": breakdown.share(phase) for phase in phases}
    return plain({"step_s": breakdown.step_s, **shares, **_fields(breakdown)})


def plain(value: Any) -> Any:
    """Any value as strict JSON: records as objects, enums by value, NaN and infinity as null, the rest as text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(_fields(value))
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(v) for v in value]
    return str(value)


def write_json(path: str | Path, obj: Any) -> None:
    """Write ``obj`` as it stands. A reader sees the old file or the new one, never a half; a pipe is written to."""
    path, text = Path(path), json.dumps(plain(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if not path.parent.is_dir():
        raise PerftrainError(f"A JSON file needs an existing folder; {str(path.parent)!r} is none. Type: mkdir -p {path.parent}")
    if path.is_dir():
        raise PerftrainError(f"A JSON file needs a name; {str(path)!r} is a folder. Type: --json {path / 'result.json'}")
    try:
        _write(path, text)
    except OSError as error:
        raise PerftrainError(f"A JSON file must be writable; {str(path)!r}: {error.strerror}. Type another path.") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a page in one go, as :func:`write_json` does."""
    path = Path(path)
    if not path.parent.is_dir():
        raise PerftrainError(f"A file needs an existing folder; {str(path.parent)!r} is none. Type: mkdir -p {path.parent}")
    _write(path, text)


def _write(path: Path, text: str) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout, a pipe: nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _number(value: float | None) -> float:
    """What could only be written as null was not a number."""
    return math.nan if value is None else float(value)


def _cause_json(cause: Cause) -> dict[str, Any]:
    return {
        "label": cause.label,
        "share": cause.share,
        "upper_bound": cause.upper_bound,
        "confidence": cause.confidence,
        "evidence": [_evidence_text(seen) for seen in cause.evidence],
        "where": cause.where,
        "try": [{k: v for k, v in asdict(attempt).items() if v != ""} for attempt in cause.tries],
        "avoid": [asdict(avoid) for avoid in cause.avoids],
    }


def _evidence_text(seen: Evidence) -> str:
    return f"{seen.line} ({seen.where})" if seen.where else seen.line


def _parity_json(parity: Parity | None) -> dict[str, Any] | None:
    if parity is None:
        return None
    fields = _fields(parity)
    return {"class": fields.pop("numerics"), **fields}


def _parity_from(raw: Mapping[str, Any] | None) -> Parity | None:
    if raw is None:
        return None
    measured = {"distance": _number(raw["distance"]), "envelope": _number(raw["envelope"])}
    return Parity(numerics=Numerics(raw["class"]), holds=raw["holds"], steps=raw["steps"], detail=raw["detail"], **measured)


def _arm_json(arm: ArmSummary | None) -> dict[str, Any] | None:
    return None if arm is None else {**_fields(arm), "breakdown": breakdown_json(arm.breakdown)}


def _arm_from(raw: Mapping[str, Any] | None) -> ArmSummary | None:
    if raw is None:
        return None
    known = {k: raw[k] for k in ArmSummary.__dataclass_fields__ if k in raw}
    return ArmSummary(**{**known, "breakdown": breakdown_from(raw["breakdown"]), "warmup_s": _number(raw["warmup_s"])})
