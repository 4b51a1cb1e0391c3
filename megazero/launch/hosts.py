"""Hostfiles, and the choice of hosts and slots by DeepSpeed's `--include`, `--exclude` and `--num_*`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megazero.errors import ConfigError
from megazero.regular_file import read_regular, why_unreadable

_SLOTS = re.compile(r"(?<!\S)slots\s*=\s*(\S*)")
MOST_SLOTS = 4096
"""More than any host has; a limit, as each slot takes memory and room in messages."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Host:
    """A machine, and its slots that a launch takes. A slot is the index of a GPU, or of a rank on a CPU.

    Attributes:
        name: a name or address for ssh.
        slots: indices of the slots, ascending.
        place: the file and line of the host, for messages.
    """

    name: str
    slots: tuple[int, ...]
    place: str = ""


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a hostfile.

    Raises ConfigError if the file cannot be read, or has malformed lines; every such line is listed.
    """
    try:
        data = read_regular(Path(path))
    except OSError as error:
        raise ConfigError(
            f"`--hostfile` must be a file that can be read, but {path} is none: {why_unreadable(error)}"
        ) from error
    return parse_hostfile(data.decode("utf-8-sig", errors="replace"), path)


def parse_hostfile(text: str, path: str = "hostfile") -> tuple[Host, ...]:
    """Parse lines ``NAME slots=N``; the hosts are in the order of the lines.

    Blank lines, comments after ``#`` and other words of a line, such as MPI's ``max_slots=8``, are ignored.
    An IPv6 address may be in brackets.

    Raises:
        ConfigError: lines are malformed; the file, number and text of each are listed.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        place = f"{path}, line {number}"
        host = _host_of(words, place)
        if isinstance(host, str):
            problems.append(f"{place}: {host}, but is `{line.strip()}`")
        elif (key := _normalized(host.name)) in hosts:
            problems.append(
                f"{place}: a host must be there once, but `{line.strip()}` is the host of "
                f"{hosts[key].place}; give it all its slots in one line"
            )
        else:
            hosts[key] = host
    if not hosts and not problems:
        problems.append(
            f"`{path}` must name at least one host, but is empty; write lines such as `w-0 slots=8`"
        )
    if problems:
        raise ConfigError(problems)
    return tuple(hosts.values())


def _host_of(words: str, place: str) -> Host | str:
    """Parse a line without its comment; return the host, or the rule that the line breaks."""
    name = words.split()[0]
    counts = _SLOTS.findall(words[len(name) :])
    name = name[1:-1] if name[0] == "[" and name[-1] == "]" else name
    if "=" in name or name.startswith("-") or "," in name or not name.isprintable():
        return "a line must begin with a host's name"
    if len(counts) != 1 or not (counts[0].isascii() and counts[0].isdecimal()):
        return "a line must be `NAME slots=N`"
    if not counts[0].strip("0"):
        return "`slots` must be at least 1 (leave a host out with a `#` before it)"
    if len(counts[0]) > len(str(MOST_SLOTS)) or int(counts[0]) > MOST_SLOTS:
        return f"`slots` must be at most {MOST_SLOTS}"
    return Host(name, tuple(range(int(counts[0]))), place)


def _normalized(name: str) -> str:
    lower = name.lower().rstrip(".")
    return "localhost" if lower in LOCAL_NAMES else lower


def parse_filter(text: str, hosts: Sequence[Host], flag: str) -> dict[str, tuple[int, ...]]:
    """Parse ``NAME[:SLOT[,SLOT]][@NAME...]`` into host name -> slots; a bare name means all slots of a host.

    Names are compared with those of `hosts`, so they may contain colons (IPv6) and ``@`` (``user@host``).

    Raises:
        ConfigError: the text names an unknown host or slot, or has another form.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    rest = text.strip()
    while rest:
        host, match = _host_at(rest, hosts)
        if host is None or match is None:
            names = ", ".join(host.name for host in hosts[:8])
            names += f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
            raise ConfigError(f"`{flag}` must name hosts of {names}, but has `{rest}`; correct the name")
        if host.name in chosen:
            raise ConfigError(f"`{flag}` must name a host once, but `{text}` has {host.name} twice")
        chosen[host.name] = host.slots if match[1] is None else _slots_of(match[1], host, flag)
        rest = rest[match.end() :]
    return chosen


def _host_at(text: str, hosts: Sequence[Host]) -> tuple[Host, re.Match[str]] | tuple[None, None]:
    """The host with which the rest of a filter begins, and the match of its name and slots."""
    for host in sorted(hosts, key=lambda host: -len(host.name)):
        match = re.match(re.escape(host.name) + r"(?::([^:@]*))?(?:@|$)", text)
        if match:
            return host, match
    return None, None


def _slots_of(text: str, host: Host, flag: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ConfigError(
            f"`{flag}` must list slots as numbers with commas, but has `{host.name}:{text}`; write "
            f"`{host.name}:0,1`, as there are no ranges"
        )
    slots = tuple(sorted(map(int, numbers)))
    where = f" ({host.place})" if host.place else ""
    for slot in slots:
        if slot not in host.slots:
            raise ConfigError(
                f"`{flag}` must name slots below {len(host.slots)} of {host.name}{where}, but has {slot}"
            )
    if len(set(slots)) < len(slots):
        raise ConfigError(f"`{flag}` must name a slot once, but has `{host.name}:{text}`")
    return slots


def include(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """The hosts and slots that `text` names, in the order of `hosts`."""
    chosen = parse_filter(text, hosts, "--include")
    return tuple(replace(host, slots=chosen[host.name]) for host in hosts if host.name in chosen)


def exclude(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """The hosts and slots that `text` does not name. Raises ConfigError if nothing is left."""
    chosen = parse_filter(text, hosts, "--exclude")
    left = []
    for host in hosts:
        slots = tuple(slot for slot in host.slots if slot not in chosen.get(host.name, ()))
        if slots:
            left.append(replace(host, slots=slots))
    if not left:
        raise ConfigError(f"`--exclude` must leave a slot, but `{text}` leaves none")
    return tuple(left)


def first(hosts: Sequence[Host], nodes: int | None, slots: int | None) -> tuple[Host, ...]:
    """The first `nodes` hosts with their first `slots` slots; None takes all.

    Raises ConfigError if there are fewer hosts or slots; every host with too few slots is listed.
    """
    if nodes is not None and not 1 <= nodes <= len(hosts):
        raise ConfigError(
            f"`--num-nodes` must be 1 to {len(hosts)}, as many as there are hosts, but is {nodes}; name more "
            "hosts in `--hostfile`"
        )
    taken = tuple(hosts[:nodes])
    if slots is None:
        return taken
    if slots < 1:
        raise ConfigError(f"`--num-gpus` must be at least 1, but is {slots}")
    problems = [
        f"`--num-gpus` must be at most {len(host.slots)} on {host.name}"
        f"{f' ({host.place})' if host.place else ''}, but is {slots}"
        for host in taken
        if len(host.slots) < slots
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(replace(host, slots=host.slots[:slots]) for host in taken)
