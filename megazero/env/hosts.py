"""Reports of several hosts, gathered over ssh, and the differences between them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast

from megazero.env.facts import Problem
from megazero.errors import printable

Document = Mapping[str, Any]
"""The JSON of `megazero env` on a host."""

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_CONNECTIONS = 16  # at once; an sshd drops some of the connections beyond ten that wait for authentication
_SECONDS = 180
_MOST_BYTES = 1 << 22
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Hosts:
    """The reports of hosts.

    Attributes:
        documents: host name -> its report, in order.
        unreachable: host name -> why there is no report.
    """

    documents: Mapping[str, Document]
    unreachable: Mapping[str, str]


@dataclass(frozen=True)
class Compared:
    """A fact that must be the same on all hosts.

    Attributes:
        name: the name of the fact.
        of: takes the fact from a host's report, as text.
        remedy: what to do if it differs.
        stops: whether a difference would end or hang a training.
    """

    name: str
    of: Callable[[Document], str]
    remedy: str
    stops: bool = False


def _version(name: str) -> Callable[[Document], str]:
    return lambda document: str(document["versions"].get(name) or "none")


def _gpus(document: Document) -> str:
    names = [gpu["name"] for gpu in document["gpus"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _of_gpus(column: str) -> Callable[[Document], str]:
    def values(document: Document) -> str:
        known = {gpu["values"].get(column, "") for gpu in document["node"]["gpus"]} - {""}
        return ", ".join(sorted(known)) or "unknown"

    return values


def _ports(document: Document) -> str:
    rates = [f"{port['rate']:g} Gb/s" for port in document["node"]["ports"] if port["state"] == "ACTIVE"]
    return ", ".join(f"{rates.count(rate)} x {rate}" for rate in sorted(set(rates))) or "none"


def _variables(document: Document) -> str:
    chosen = {
        k: v for k, v in document["variables"].items() if k.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_"))
    }
    return " ".join(f"{name}={value}" for name, value in sorted(chosen.items())) or "none"


def _modules(document: Document) -> str:
    return ", ".join(module["name"] for module in document["modules"] if module["trouble"]) or "none"


_SAME_BUILD = "install the same one on all hosts"
COMPARED: tuple[Compared, ...] = (
    Compared("megazero", _version("megazero"), _SAME_BUILD, stops=True),
    Compared("megazero's sources", lambda d: d["node"]["code"], "copy one folder to all hosts", stops=True),
    Compared("Python", _version("python"), _SAME_BUILD),
    Compared("torch", _version("torch"), _SAME_BUILD, stops=True),
    Compared("torch's CUDA", _version("cuda"), _SAME_BUILD, stops=True),
    Compared("NCCL", _version("nccl"), "install the same torch on all hosts", stops=True),
    Compared("modules not built", _modules, "build them on all hosts", stops=True),
    Compared("GPUs", _gpus, "use hosts of one kind: all ranks wait for the slowest"),
    Compared("driver", _of_gpus("driver_version"), "install the same driver on all hosts"),
    Compared(
        "GPU clocks (MHz)", _of_gpus("clocks.max.sm"), "run `nvidia-smi -rgc` on hosts with locked clocks"
    ),
    Compared("GPU power (W)", _of_gpus("power.limit"), "set one limit on all hosts with `nvidia-smi -pl`"),
    Compared("active RDMA ports", _ports, "look at the cables and switches of the hosts with fewer"),
    Compared("kernel", lambda d: d["node"]["kernel"]["release"], "install the same kernel on all hosts"),
    Compared(
        "governor",
        lambda d: ", ".join(d["node"]["kernel"]["governors"]),
        "run `cpupower frequency-set -g performance`",
    ),
    Compared("usable cores", lambda d: str(d["processors"]["usable"]), "look at cpusets and at SMT"),
    Compared(
        "variables of NCCL",
        _variables,
        "set the same on all hosts: they decide how ranks connect",
        stops=True,
    ),
)
"""The compared facts, in the order of the report."""


def remote_command(flags: Sequence[str]) -> str:
    """The command that reports on a host with the same paths of Python and megazero as here."""
    words = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", "megazero.cli", "env", "--json", *flags]
    return shlex.join(words)


def gather_hosts(ranks: Mapping[str, int | None], ssh: str = SSH) -> Hosts:
    """Ask all hosts for their reports, a few at a time.

    Args:
        ranks: host name -> ranks of a training on the host; None for one for each GPU.
        ssh: the words before the host and the command that runs there.
    """
    words = shlex.split(ssh)

    def ask(name: str) -> Document | str:
        count = ranks[name]
        return _ask([*words, name, remote_command(() if count is None else ("--nproc", str(count)))])

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        answers = dict(zip(ranks, pool.map(ask, ranks), strict=True))
    documents = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    return Hosts(documents, {name: reason for name, reason in answers.items() if isinstance(reason, str)})


def _ask(command: Sequence[str]) -> Document | str:
    """The report that a command prints, or the reason why there is none."""
    # Files, not pipes: a stray process, such as ssh's ControlPersist master, can keep a pipe open.
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"gave no answer within {_SECONDS} s"
        except OSError as error:
            return f"`{command[0]}` cannot be run: {error.strerror}"
        output, errors = (_text_of(file) for file in (out, err))
    for line in reversed(output.splitlines()):  # a shell's greeting may come first
        try:
            document = json.loads(line)
            hosts_report(Hosts({"": document}, {}))
        except _MALFORMED:
            continue
        return cast("Document", document)
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"status {done.returncode}: {printable(lines[-1]) if lines else 'no report'}"


def _text_of(file: IO[bytes]) -> str:
    """The end of the output of a command, at most 4 MiB."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_BYTES))
    return file.read().decode(errors="replace")


def differences(documents: Mapping[str, Document]) -> tuple[Problem, ...]:
    """A problem for each fact that differs between hosts; the value of most hosts counts as right."""
    return tuple(_differences(documents))


def _differences(documents: Mapping[str, Document]) -> Iterator[Problem]:
    for row in COMPARED:
        groups: dict[str, list[str]] = {}
        for name, document in documents.items():
            groups.setdefault(row.of(document), []).append(name)
        if len(groups) < 2:
            continue
        most, *others = sorted(groups.items(), key=lambda item: -len(item[1]))
        odd = "; ".join(f"{value or 'unknown'} on {_named(names)}" for value, names in others)
        yield Problem(
            f"differs_{row.name.lower().replace(' ', '_')}",
            f"{row.name} must be the same on all hosts, but is {most[0] or 'unknown'} on "
            f"{_named(most[1])}, and {odd}",
            row.remedy,
            row.stops,
        )


def _named(names: Sequence[str]) -> str:
    """The names of some hosts; only the first three of more than four."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def hosts_report(hosts: Hosts) -> str:
    """The report as text: a row for each host, the differences, and the problems of all hosts."""
    lines = ["hosts"]
    columns = ("megazero", "torch", "NCCL", "driver", "GPUs", "kernel")
    rows: list[tuple[str, ...]] = [("host", *columns)]
    chosen = {row.name: row for row in COMPARED}
    for name, document in hosts.documents.items():
        rows.append((name, *(chosen[column].of(document) for column in columns)))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines += [
        "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"  {name}  unreachable: {reason}" for name, reason in hosts.unreachable.items()]
    differing = differences(hosts.documents)
    lines += ["", f"differences: {len(differing) or 'none'}", *(f"  {problem}" for problem in differing)]
    problems = [(name, problem) for name, d in hosts.documents.items() for problem in d["problems"]]
    lines += ["", f"problems: {len(problems) or 'none found'}"]
    shared: dict[str, list[str]] = {}
    for name, problem in problems:
        text = f"{problem['message']}; {problem['remedy']} [{problem['name']}]"
        shared.setdefault(text, []).append(name)
    lines += [f"  {_named(names)}: {text}" for text, names in shared.items()]
    return printable("\n".join(lines))


def hosts_document(hosts: Hosts) -> dict[str, object]:
    """The report as a JSON object."""
    differing = [vars(problem) for problem in differences(hosts.documents)]
    return {"hosts": {**hosts.documents}, "unreachable": {**hosts.unreachable}, "differences": differing}


def hosts_status(hosts: Hosts) -> tuple[bool, bool]:
    """Whether there are problems, and whether one of them would stop a training."""
    problems = [problem["stops"] for document in hosts.documents.values() for problem in document["problems"]]
    problems += [problem.stops for problem in differences(hosts.documents)]
    problems += [True] * len(hosts.unreachable)
    return bool(problems), any(problems)
