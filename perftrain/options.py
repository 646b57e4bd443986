"""The command line's words: verbs, the few flags that every verb takes, Hydra overrides, and what to say of mistakes."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perftrain.facts import PerftrainError

VERBS = ("diagnose", "try", "tune", "gate", "report", "runs", "doctor", "opts")
LATER = {"scale": "scaling studies"}
FLAGS = {"--json": "json", "--budget": "measure.budget_s", "--runs": "runs", "--config-dir": "hydra.searchpath"}
HYDRA_FLAGS = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--resolve",
    "--package",
    "-p",
    "--hydra-help",
    "--version",
    "--shell-completion",
    "-sc",
)
"""Hydra's flags that only show something."""

WITH_PROGRAM = ("diagnose", "try", "tune", "gate")
"""Verbs that take a script."""
GATE_FLAGS = ("--baseline", "--against")
REPORT_FLAGS = ("--out",)
TRACE_FLAG = "--trace"
"""Of ``diagnose``: read one. Of ``report``: write one; its file need not be named."""
NSIGHT_FLAGS = ("--nsys", "--ncu")
"""Of ``diagnose``: with a report that was recorded before, or before a program that is to run under the tool."""
REPORTS = (".sqlite", ".csv", ".nsys-rep", ".ncu-rep", ".qdrep")
"""What such a report ends in."""

HELP = """\
perftrain: every speed optimization of a PyTorch training is a switch, and every switch gets a measured verdict.

  python -m perftrain                                 train the default recipe, record its baseline, say where the time goes
  python -m perftrain +opt=amp                        the same with one switch: faster, slower, or no difference?
  python -m perftrain +opt=[amp,channels_last]        a bundle (its parts cannot be told apart)
  python -m perftrain -m +opt=amp,tf32,compile        a sweep: one verdict each, then a ranking; goes on where it was stopped
  perftrain try amp,channels_last [overrides]         the same verdict as a verb
  perftrain diagnose [overrides]                      what rules a step, how much it can give, what to try and what not to
  perftrain diagnose train.py [its arguments]         the same for any training script, unedited (or -m package.module)
  perftrain diagnose --trace trace.json               the same from what torch.profiler exported, on any machine
  perftrain diagnose --nsys|--ncu train.py            the same, run under Nsight Systems or Nsight Compute
  perftrain diagnose --nsys report.sqlite             the same from what they exported (--ncu report.csv), on any machine
  perftrain try amp,workers=4 train.py [its arguments] the same verdict on any training script, unedited
  perftrain try --apply amp train.py [its arguments]  run the script to its end with the switches on
  perftrain tune [overrides | train.py its arguments] try what the diagnosis recommends, one by one; keep what is proved
  perftrain gate --baseline FILE train.py             exit code 3 if it is slower than it was (--against REV: than that commit)
  perftrain opts                                      the switches, and which of them run here
  perftrain report RUN|SWEEP|FILE.json [--open]       one self-contained HTML page (--markdown: for a pull request)
  perftrain report RUN --trace [FILE]                 and the phases of every step as a trace for ui.perfetto.dev
  perftrain runs                                      what is recorded
  perftrain doctor                                    this machine: versions, devices, measured peaks, what cannot run

Overrides (Hydra): recipe=photos|digits|text   recipe.data.root=/my/imagefolder   recipe.batch_size=64   recipe.steps=200
                   opt.amp.dtype=float16   device=cpu   measure.resolution=0.01   (--cfg job shows them all)
Flags of every verb: --json FILE (the same facts as printed)   --budget SECONDS (timing of one comparison; 45)   --runs DIR
                     --config-dir DIR (your own recipe/*.yaml and opt/*.yaml)
Exit codes: 0 done, 1 the program under test failed, 2 usage error, 3 slower (gate), 130 or 143 stopped.
"""


@dataclass(frozen=True)
class Line:
    """A command line, sorted out."""

    verb: str
    """Empty: train and measure."""
    overrides: tuple[str, ...]
    multirun: bool = False
    hydra_flags: tuple[str, ...] = ()
    """What only Hydra understands (``--cfg job``); it then answers alone."""
    flags: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    """A script (or ``-m module``) with its arguments."""
    full: bool = False
    """``--full``, ``try --apply``: let the script run to its end."""
    markdown: bool = False
    open: bool = False
    """Of ``report``: to standard output as Markdown; in a browser."""


def sort_out(arguments: Sequence[str]) -> Line:
    """Verb, flags and overrides of a command line.

    Raises:
        PerftrainError: an unknown verb, a flag without its value, a budget that is no number.
    """
    arguments, program = _take_program(list(arguments))
    rest, flags = _take_flags(list(arguments))
    verb = rest.pop(0) if rest and rest[0][:1] not in "-~" and "=" not in rest[0] else ""
    if verb in LATER:
        raise PerftrainError(
            f"{LATER[verb].capitalize()} is not in this version of perftrain. It has: {', '.join(VERBS)}; see perftrain --help."
        )
    if verb and verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PerftrainError(
            f"A verb is one of {', '.join(VERBS)}, or none to train; {verb!r} is neither that nor an override (key=value).{hint}"
        )
    if verb == "report":
        words = [a for a in rest if a not in ("--markdown", "--open")]
        if len(words) != 1:
            raise PerftrainError("report needs one run, sweep folder or JSON file: perftrain report baseline-photos-1a2b3c4d.")
        return Line(verb, tuple(words), flags=flags, markdown="--markdown" in rest, open="--open" in rest)
    if TRACE_FLAG in flags and verb != "report" and (verb != "diagnose" or program or rest):
        raise PerftrainError("--trace belongs to perftrain report RUN, or to diagnose, alone: perftrain diagnose --trace trace.json.")
    _check_nsight(verb, flags, bool(program or rest))
    if verb != "report" and "--out" in flags:
        raise PerftrainError("--out belongs to perftrain report.")
    if verb != "gate" and (wrong := [f for f in GATE_FLAGS if f in flags]):
        raise PerftrainError(f"{wrong[0]} belongs to perftrain gate.")
    if verb == "gate" and not (program and len(flags.keys() & set(GATE_FLAGS)) == 1):
        raise PerftrainError(
            "gate needs a script and what it is compared with: perftrain gate --baseline FILE train.py, or --against REVISION."
        )
    full = ("--full" in rest and verb == "diagnose") or ("--apply" in rest and verb == "try")
    rest = [a for a in rest if not (full and a in ("--full", "--apply"))]
    if program:
        return Line(verb, _before_program(verb, rest), flags=flags, program=tuple(program), full=full)
    if verb == "try":
        if not rest or rest[0].startswith("-") or "=" in rest[0]:
            raise PerftrainError("try needs the names of switches: perftrain try amp,channels_last [overrides].")
        rest[0] = f"+opt=[{rest[0]}]"
    multirun = any(a in ("-m", "--multirun") for a in rest)
    rest = [a for a in rest if a not in ("-m", "--multirun")]
    overrides = [a for a in rest if ("=" in a and not a.startswith("-")) or a.startswith("~")]
    hydra_flags = tuple(a for a in rest if a not in overrides)
    _check_flags(hydra_flags)
    return Line(verb, tuple(overrides), multirun, hydra_flags, flags)


def _check_nsight(verb: str, flags: dict[str, str], runs_something: bool) -> None:
    given = [f for f in NSIGHT_FLAGS if f in flags]
    if given and (verb != "diagnose" or len(given) > 1 or TRACE_FLAG in flags):
        raise PerftrainError(f"{given[0]} belongs to perftrain diagnose, one such flag at a time: perftrain diagnose {given[0]} train.py.")
    if given and flags[given[0]] and runs_something:
        raise PerftrainError(
            f"{given[0]} takes a report or a program; {flags[given[0]]!r} and a program were given. Leave one of them out."
        )


def _is_report(word: str) -> bool:
    return word.endswith(REPORTS) and not word.startswith("-") and "=" not in word


def _before_program(verb: str, rest: list[str]) -> tuple[str, ...]:
    """What may stand between the verb and a script."""
    if verb == "try" and (len(rest) != 1 or rest[0].startswith("-")):
        raise PerftrainError("try needs the names of switches, then the script: perftrain try amp,channels_last train.py [its arguments].")
    wrong = [a for a in rest if verb in ("diagnose", "gate") or (verb == "tune" and not a.startswith("tune."))]
    if wrong[:1] == ["torchrun"]:
        raise PerftrainError("torchrun is written as the module that it is: -m torch.distributed.run --nproc-per-node 2 train.py.")
    if wrong:
        allowed = "tune.min_gain=0.02, tune.allow_changed=true and perftrain's flags" if verb == "tune" else "perftrain's flags"
        raise PerftrainError(f"Before a script come only {allowed}; {wrong[0]!r} is none. What follows the script's name belongs to it.")
    return tuple(rest)


def _take_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and the script with all that follows it."""
    if not arguments or arguments[0] not in WITH_PROGRAM:
        return arguments, []
    names = 3 if arguments[1:2] == ["--apply"] else 2
    skip, first = False, names if arguments[0] == "try" else 1  # try amp train.py: the first word names switches
    for i, word in enumerate(arguments[first:], first):
        if skip:
            skip = False
        elif word in (*FLAGS, *GATE_FLAGS, *REPORT_FLAGS, TRACE_FLAG):
            skip = True
        elif word in NSIGHT_FLAGS:
            skip = _is_report((*arguments[i + 1 :], "")[0])
        elif word == "-m" or (not word.startswith("-") and (word.endswith(".py") or Path(word).is_file()) and "=" not in word):
            return arguments[:i], arguments[i:]
    return arguments, []


def _check_flags(words: tuple[str, ...]) -> None:
    """Words that are neither ours nor one of Hydra's flags that show something (or such a flag's value)."""
    for before, word in zip(("", *words), words, strict=False):
        name = word.partition("=")[0]
        if name in HYDRA_FLAGS or (before in HYDRA_FLAGS and not word.startswith("-")):
            continue
        near = difflib.get_close_matches(name, [*FLAGS, *HYDRA_FLAGS, "--multirun"], 1)
        if name.startswith("-"):
            hint = f"Did you mean {near[0]}?" if near else "Type perftrain --help."
            raise PerftrainError(f"A flag is one of {', '.join([*FLAGS, '-m', '--cfg job', '--help'])}; {name!r} is none. {hint}")
        raise PerftrainError(f"After the verb come overrides (key=value); {word!r} is none. For a switch, type +opt={word}.")


def _take_flags(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    rest: list[str] = []
    flags: dict[str, str] = {}
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name in NSIGHT_FLAGS:
            flags[name] = value or (arguments.pop(0) if arguments and _is_report(arguments[0]) else "")
            continue
        if name not in (*FLAGS, *GATE_FLAGS, *REPORT_FLAGS, TRACE_FLAG):
            rest.append(name + equals + value)
            continue
        if not equals:
            if name == TRACE_FLAG and rest[:1] == ["report"] and (len(rest) < 2 or not arguments or arguments[0].startswith("-")):
                flags[name] = ""  # beside the page: the word that follows is the run, if there is one
                continue
            if not arguments:
                raise PerftrainError(f"{name} needs a value: {name} {'60' if name == '--budget' else 'PATH'}.")
            value = arguments.pop(0)
        flags[name] = value
    if "--budget" in flags:
        try:
            enough = 1 <= float(flags["--budget"]) < float("inf")
        except ValueError:
            enough = False
        if not enough:
            raise PerftrainError(f"--budget is a number of seconds, 1 or more; it was {flags['--budget']!r}. Try --budget 60.")
    return rest, flags


def as_overrides(line: Line) -> list[str]:
    """The line's overrides with the flags among them."""
    return [*line.overrides, *(f"{FLAGS[name]}={_value(name, value)}" for name, value in line.flags.items())]


def again(line: Line) -> str:
    """What to type for the same once more."""
    return shlex.join(["python", "-m", "perftrain", *["-m"] * line.multirun, *line.overrides, *typed_flags(line)])


def typed_flags(line: Line) -> list[str]:
    """The flags that belong to what is done, as words; where its JSON goes does not."""
    return [word for name, value in line.flags.items() if name != "--json" for word in (name, value)]


def _value(name: str, value: str) -> str:
    if name != "--config-dir":
        return _quoted(value)
    if not Path(value).is_dir():
        raise PerftrainError(
            f"--config-dir names a folder with recipe/*.yaml or opt/*.yaml; {value!r} is none. Try --config-dir ./configs."
        )
    return f"[{_quoted('file://' + str(Path(value).resolve()))}]"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'" if not value.replace(".", "").isdigit() else value
