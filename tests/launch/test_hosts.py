"""Hostfiles as users write them, and DeepSpeed's words for choosing from them."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError
from megazero.launch.hosts import Host, exclude, first, include, parse_hostfile, read_hostfile
from tests.tables import over_table

HOSTS = parse_hostfile("w-0 slots=4\nw-1 slots=4\nfe80::1 slots=2\nfe80::1:2 slots=2\nme@w-9 slots=1\n")


def shape(hosts) -> dict[str, list[int]]:
    return {host.name: list(host.slots) for host in hosts}


@over_table(
    ("line", "name", "slots"),
    [
        ("w-0 slots=4", "w-0", 4),
        ("  w-0\tslots=4  ", "w-0", 4),
        ("w-0 slots=4 # a comment", "w-0", 4),
        ("w-0 slots = 4", "w-0", 4),
        ("w-0 slots=2 max_slots=4", "w-0", 2),
        ("w-0 max_slots=4 slots=3 gpu", "w-0", 3),
        ("10.0.0.1 slots=8", "10.0.0.1", 8),
        ("fe80::1%eth0 slots=2", "fe80::1%eth0", 2),
        ("[fe80::1] slots=2", "fe80::1", 2),
        ("me@w-0.example.com slots=1", "me@w-0.example.com", 1),
    ],
)
def test_a_line_is_read_as_users_write_it(line, name, slots):
    assert shape(parse_hostfile(line)) == {name: list(range(slots))}


def test_comments_blank_lines_a_mark_of_byte_order_and_any_end_of_line(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\nw-1 slots=2\r\nw-0 slots=1\r   \nw-2 slots=1")
    assert shape(read_hostfile(str(path))) == {"w-1": [0, 1], "w-0": [0], "w-2": [0]}


@over_table(
    "line",
    [
        *("w-0", "w-0 slots=", "w-0 slots=four", "w-0 slots=4x", "w-0 slots=-1", "w-0 slots=0", "slots=4"),
        *(
            "w-0 slots=2 slots=4",
            "w-0, slots=4",
            "-oProxyCommand=x slots=4",
            "w-0 max_slots=4",
            "w-0 slots=²",
            "w-0 slots=99999999999",
            f"w-0 slots={'9' * 5000}",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_its_number_and_text(line):
    with pytest.raises(ConfigError) as refusal:
        parse_hostfile(f"# first\nw-8 slots=1\n{line}\n", "hosts")
    (reason,) = refusal.value.violations
    assert reason.startswith("hosts, line 3: ")
    assert reason.endswith(f"but is `{line}`")


def test_a_name_is_printable():
    """A NUL in it was a traceback of the first process that got it."""
    for name in ("w\0", "\x1b[31mw"):
        with pytest.raises(ConfigError, match="must begin with a host's name"):
            parse_hostfile(f"{name} slots=1")


@over_table("again", ["w-0 slots=2", "W-0 slots=2", "w-0. slots=1"])
def test_a_host_twice_is_refused(again):
    with pytest.raises(ConfigError, match=r"line 2: a host must be there once.*the host of hostfile, line 1"):
        parse_hostfile(f"w-0 slots=4\n{again}\n")


def test_names_of_this_machine_are_one_host():
    with pytest.raises(ConfigError, match="a host must be there once"):
        parse_hostfile("localhost slots=1\n127.0.0.1 slots=1\n")


def test_all_bad_lines_are_listed():
    with pytest.raises(ConfigError) as refusal:
        parse_hostfile("w-0\nw-1 slots=0\nw-2 slots=1\nw-2 slots=1\n")
    assert [reason.split(":")[0] for reason in refusal.value.violations] == [
        f"hostfile, line {number}" for number in (1, 2, 4)
    ]


def test_a_file_without_hosts_or_without_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must name at least one host, but is empty"):
        parse_hostfile("# nothing\n\n")
    with pytest.raises(ConfigError, match="must be a file that can be read"):
        read_hostfile(str(tmp_path / "missing"))


@over_table(
    ("text", "chosen"),
    [
        ("w-0", {"w-0": [0, 1, 2, 3]}),  # DeepSpeed has selected nothing since 2024
        ("w-0@w-1:0,2", {"w-0": [0, 1, 2, 3], "w-1": [0, 2]}),
        ("w-1:2,0@w-0:3", {"w-0": [3], "w-1": [0, 2]}),
        ("fe80::1:0", {"fe80::1": [0]}),
        ("fe80::1:2:1@fe80::1", {"fe80::1": [0, 1], "fe80::1:2": [1]}),
        ("me@w-9@w-0:1", {"w-0": [1], "me@w-9": [0]}),
    ],
)
def test_what_include_chooses(text, chosen):
    assert shape(include(HOSTS, text)) == chosen


def test_what_exclude_leaves():
    assert shape(exclude(HOSTS[:2], "w-0")) == {"w-1": [0, 1, 2, 3]}
    assert shape(exclude(HOSTS[:2], "w-0:1,3")) == {"w-0": [0, 2], "w-1": [0, 1, 2, 3]}
    with pytest.raises(ConfigError, match="`--exclude` must leave a slot"):
        exclude(HOSTS[:2], "w-0@w-1")


@over_table(
    ("text", "reason"),
    [
        ("w-7", "must name hosts of w-0, w-1, .* but has `w-7`"),
        ("w-0@", None),
        ("w-0@@w-1", "but has `@w-1`"),
        ("w-0:9", r"slots below 4 of w-0 \(hostfile, line 1\), but has 9"),
        ("w-0:0-3", "there are no ranges"),
        ("w-0:", "as numbers with commas"),
        ("w-0:1,1", "must name a slot once"),
        ("w-0@w-0:1", "has w-0 twice"),
        ("w-0:1:2", "but has `w-0:1:2`"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(text, reason):
    for choose in (include, exclude):
        if reason is None:
            assert choose(HOSTS, text)
        else:
            with pytest.raises(ConfigError, match=reason):
                choose(HOSTS, text)


def test_the_first_hosts_and_slots():
    assert shape(first(HOSTS, 2, 3)) == {"w-0": [0, 1, 2], "w-1": [0, 1, 2]}
    assert first(HOSTS, None, None) == HOSTS
    with pytest.raises(ConfigError) as refusal:
        first(HOSTS, None, 4)
    assert len(refusal.value.violations) == 3
    assert "at most 2 on fe80::1 (hostfile, line 3), but is 4" in str(refusal.value)
    with pytest.raises(ConfigError, match="must be 1 to 5"):
        first(HOSTS, 6, None)
    with pytest.raises(ConfigError, match="at least 1"):
        first((Host("w-0", (0,)),), None, 0)
