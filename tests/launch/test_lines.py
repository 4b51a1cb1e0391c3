"""Whole lines from what ranks write in pieces, and progress bars."""

from __future__ import annotations

import asyncio
import os

from megazero.launch.lines import LONGEST, LineCutter, Outlet


def cut(*pieces: bytes, seconds: float = 0.1) -> list[bytes]:
    cutter = LineCutter()
    lines = [line for i, piece in enumerate(pieces) for line in cutter.feed(piece, i * seconds)]
    return [*lines, *cutter.finish()]


def test_lines_are_whole_however_they_come():
    assert cut(b"a", b"b\nc", b"\n\nlast words") == [b"ab", b"c", b"", b"last words"]
    assert cut(b"windows\r\n", b"ends\r", b"\n") == [b"windows", b"ends"]
    assert cut(*(bytes([byte]) for byte in b"one\ntwo\n")) == [b"one", b"two"]


def test_a_progress_bar_counts_each_second_and_when_it_ends():
    bar = [b"\r%d%%" % percent for percent in range(0, 100, 10)]
    assert cut(*bar, b"\r100%\n", b"done\n") == [b"0%", b"100%", b"done"]
    assert cut(*bar, b"\r100%\n", seconds=0.5) == [b"0%", b"20%", b"40%", b"60%", b"80%", b"100%"]


def test_a_line_without_an_end_is_cut():
    lines = cut(b"x" * (2 * LONGEST + 5))
    assert [len(line) for line in lines] == [LONGEST, LONGEST, 5]


def test_an_outlet_keeps_order_holds_writers_back_and_ends_with_its_reader():
    async def work() -> None:
        read, write = os.pipe()
        outlet = Outlet(write)
        writer = asyncio.create_task(fill(outlet))
        await asyncio.sleep(0.2)
        assert not writer.done()  # the pipe is full, and nobody reads
        data = await asyncio.to_thread(os.read, read, 100)
        assert data.startswith(b"0\n1\n2\n")
        os.close(read)
        await asyncio.wait_for(writer, 5)
        assert outlet.broken
        outlet.close()
        await asyncio.sleep(0.05)
        os.close(write)

    async def fill(outlet: Outlet) -> None:
        for number in range(40_000):
            await outlet.write(b"%d\n" % number)
            if outlet.broken:
                return

    asyncio.run(work())
