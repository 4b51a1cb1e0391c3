"""watch: no process of a failed job waits forever, and the first rank that diverged is named.

`log.py` records each call, `watch.py` and `heartbeat.py` notice trouble, `job_notes.py` is where the
processes leave messages for each other, `report.py` is what they tell each other, `diagnose.py` works out
from the reports who diverged, and `failure.py` makes all ranks agree on one answer.
"""

from megazero.mpu.watch.job_notes import StoreJobNotes
from megazero.mpu.watch.watch import Watch

__all__ = ["StoreJobNotes", "Watch"]
