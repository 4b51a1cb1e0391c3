"""watch: no process of a failed job waits for ever, and the first rank that diverged is named.

`log.py` notes each call, `watch.py` notices trouble, `board.py` is where the processes leave word,
`report.py` is what they leave, `diagnose.py` says from the reports who diverged, `inquest.py` is how all
ranks come to one answer.
"""

from megazero.mpu.watch.board import Board, StoreBoard
from megazero.mpu.watch.group import WatchedGroup
from megazero.mpu.watch.watch import EXIT_STATUS, Watch

__all__ = ["EXIT_STATUS", "Board", "StoreBoard", "Watch", "WatchedGroup"]
