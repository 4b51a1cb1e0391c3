"""pipeline: schedules as values, passes that lower them, what they cost on paper, and how layers are split.

Start with `actions.py` (the values), `schedules.py` (how they are built), `lower.py` (what the executor gets)
and `simulate.py`. Everything is pure except `executor.py`, which runs one stage's list.
"""

from megazero.pipeline.lower import lower
from megazero.pipeline.partition import partition
from megazero.pipeline.simulate import simulate

__all__ = ["lower", "partition", "simulate"]
