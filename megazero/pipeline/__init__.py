"""pipeline: schedules as values, passes that lower them, their simulation, and the partition of layers.

Start with `actions.py` (the values), `schedules.py` (builders), `lower.py` (schedule to program) and
`simulate.py`. All are pure functions except `executor.py`, which runs one stage's instructions.
"""

from megazero.pipeline.lower import lower
from megazero.pipeline.partition import partition
from megazero.pipeline.simulate import simulate

__all__ = ["lower", "partition", "simulate"]
