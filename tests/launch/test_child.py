"""Processes whose output a descendant holds open after they have ended, and hosts that say anything."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time

import pytest

from megazero.errors import LaunchError
from megazero.launch import ssh
from megazero.launch.agent import _replace_file, can_reach
from megazero.launch.channel import LINE_LIMIT, message_of
from megazero.launch.child import Child
from megazero.launch.hosts import Host
from megazero.launch.job import Job, Script
from megazero.launch.lines import line_bytes, say
from tests.launch.cluster import Launch

PIPE = asyncio.subprocess.PIPE


def test_a_process_has_ended_though_a_descendant_holds_its_output(monkeypatch):
    """asyncio waits for the descendant; and its pipes complained of a closed loop as they were collected."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    async def run() -> tuple[int, bytes]:
        child = await Child.start("sh", "-c", "sleep 30 & echo $!; exit 3", stdout=PIPE, stderr=PIPE)
        pid = await child.stdout.readline()
        status = await asyncio.wait_for(child.ended(), 5)
        await child.close()
        return status, pid

    status, pid = asyncio.run(run())
    os.kill(int(pid), signal.SIGKILL)
    gc.collect()
    assert (status, complaints) == (3, [])


def test_a_launch_ends_with_its_ranks_whatever_they_leave_behind(tmp_path):
    """Children of the script that hosts source, and of a rank, hold outputs; the launch waited for ever."""
    (tmp_path / "venv.sh").write_text("sleep 90 &\necho $! >> pids\n")
    (tmp_path / "leave.py").write_text(
        "import subprocess\n"
        "child = subprocess.Popen(['env', '-i', '/bin/sleep', '90'], start_new_session=True)\n"
        "open('pids', 'a').write(f'{child.pid}\\n')\nprint('done')\n"
    )
    one = Launch(["--num-gpus", "1", "--venv-script", "./venv.sh", "leave.py"], tmp_path, {})
    try:
        assert one.status() == 0, one.notices()  # which waits for a minute, as the strays would
        assert one.lines() == ["localhost[0]: done"]
        assert "Event loop is closed" not in one.notices()
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def unreachable(monkeypatch, *scripts: str) -> str:
    """The refusal of a launch whose hosts answer with these shell scripts instead of an agent."""
    monkeypatch.setattr(ssh, "agent_command", lambda reach, job, node: ("sh", "-c", scripts[node]))
    monkeypatch.setattr(ssh, "_PAUSE", 0.05)
    hosts = tuple(Host(f"w-{node}", (0,)) for node in range(len(scripts)))

    async def run() -> None:
        connections = ssh.Connections(Job("key", hosts, Script(("x",), {}, ".")), None, 8)
        try:
            raise ssh.unreachable_error((await connections.open())[1])
        finally:
            await connections.abandon()

    with pytest.raises(LaunchError) as refusal:
        asyncio.run(run())
    return str(refusal.value)


def test_hosts_that_answer_with_anything_are_named_together(monkeypatch):
    """Also those whose output is still held when they have gone, and a greeting without a name."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    began = time.monotonic()
    text = unreachable(
        monkeypatch,
        "sleep 21 & echo refused >&2; exit 255",
        'echo \'{"kind": "hello", "boot": "", "addresses": []}\'; exit 1',
        'echo \'{"kind": "hello", "host": "\\u001b[31m", "boot": "", "addresses": []}\'; exit 1',
        "printf '\\033]0;title\\007\\n'; printf '%2000000s\\n' x >&2; exit 1",
        "seq 1000; exit 1",
    )
    assert time.monotonic() - began < 30  # one that waits takes 40 s
    gc.collect()
    assert complaints == []
    assert "w-0: refused" in text
    assert 'w-1: {"kind": "hello", "boot": "", "addresses": []}' in text
    assert "w-2: " in text
    assert "w-4: 998 / 999 / 1000" in text
    assert text.replace("\n", "").isprintable()


def test_a_message_has_all_that_its_kind_has_or_is_text():
    sound = {"kind": "ended", "label": "3", "status": 137}
    assert message_of(b'{"kind": "ended", "label": "3", "status": 137}\n') == sound
    for line in (
        b'{"kind": "ended", "label": "3"}\n',
        b'{"kind": "ended", "label": "3", "status": -1}\n',
        b'{"kind": "ended", "label": "3", "status": true}\n',
        b'{"kind": "ended", "label": "\\u001b[2J", "status": 0}\n',
        b'{"kind": "ended", "label": ["3"], "status": 0}\n',
        b'{"kind": ["ended"]}\n',
        b'{"kind": "signal", "number": 99}\n',
        b'{"kind": "stop", "grace": NaN}\n',
        b'{"kind": "reached", "addresses": [5]}\n',
        b'["ended"]\n',
        b"[" * 100_000,
        b"\xff\n",
    ):
        assert message_of(line)["kind"] == "text", line


def test_what_is_said_of_others_is_printable(capsys):
    say("w-1\x1b]0;title\x07: gone\r\u202e")
    assert capsys.readouterr().err == "megazero launch: w-1\\x1b]0;title\\x07: gone\\r\\u202e\n"
    assert line_bytes("w-1", "0", "\x1b[32mgreen\x1b[0m", True) == b"w-1[0]: \x1b[32mgreen\x1b[0m\n"
    assert line_bytes("w-1", "0", "\udc80", True) == b"w-1[0]: \x80\n"
    assert line_bytes("w-1", "0", "\ud800", True) == b"w-1[0]: ?\n"


def test_an_address_that_answers_without_end_is_not_reached():
    async def run() -> bool:
        async def talk(reader, writer):
            writer.write(b"x" * LINE_LIMIT)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        try:
            return await can_reach("127.0.0.1", server.sockets[0].getsockname()[1], "word")
        finally:
            server.close()

    assert asyncio.run(run()) is False


def test_the_pid_file_is_made_anew_and_follows_no_link(tmp_path):
    """`--save-pid` wrote through a link that somebody had put into the temporary folder."""
    mine, planted = tmp_path / "mine", tmp_path / "7.deepspeed"
    mine.write_text("all I have")
    planted.symlink_to(mine)
    _replace_file(planted, "7")
    assert (mine.read_text(), planted.read_text(), planted.is_symlink()) == ("all I have", "7", False)
    with pytest.raises(LaunchError, match="`--save-pid` must write"):
        _replace_file(tmp_path, "7")
