"""What is broken where, and what must come of it: a file per kind of fault."""

from proofs.fault_matrix.cases.batches import batches_that_are_noise
from proofs.fault_matrix.cases.case import FaultCase
from proofs.fault_matrix.cases.checkpoints import checkpoints_that_are_bad
from proofs.fault_matrix.cases.copies import copies_that_differ
from proofs.fault_matrix.cases.data import data_that_changes
from proofs.fault_matrix.cases.disks import disks_that_fail
from proofs.fault_matrix.cases.finite import states_that_are_not_finite
from proofs.fault_matrix.cases.gradients import gradients_that_are_wrong
from proofs.fault_matrix.cases.ranks import ranks_that_are_slow_or_gone
from proofs.fault_matrix.cases.settings import settings_that_differ
from proofs.fault_matrix.cases.sums import sums_that_are_wrong


def all_cases() -> list[FaultCase]:
    """All of them, by kind."""
    return [
        *settings_that_differ(),
        *copies_that_differ(),
        *gradients_that_are_wrong(),
        *sums_that_are_wrong(),
        *states_that_are_not_finite(),
        *batches_that_are_noise(),
        *disks_that_fail(),
        *data_that_changes(),
        *checkpoints_that_are_bad(),
        *ranks_that_are_slow_or_gone(),
    ]
