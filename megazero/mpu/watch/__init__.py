"""watch: no process of a failed job waits forever, and the first rank that diverged is named.

`log.py` records each call, `watch.py` and `heartbeat.py` notice trouble, `board.py` is where the processes
leave messages for each other, `report.py` is what they tell each other, `diagnose.py` works out from the
reports who diverged, and `inquest.py` makes all ranks agree on one answer.
"""

from megazero.mpu.watch.board import Board, StoreBoard, keeper_of_store
from megazero.mpu.watch.group import WatchedGroup, watched
from megazero.mpu.watch.inquest import JobFailure
from megazero.mpu.watch.watch import EXIT_STATUS, Watch, WatchLimits

__all__ = [
    "EXIT_STATUS",
    "Board",
    "JobFailure",
    "StoreBoard",
    "Watch",
    "WatchLimits",
    "WatchedGroup",
    "keeper_of_store",
    "watched",
]
