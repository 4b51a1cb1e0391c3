"""The faults that are planted in context parallelism: each has its place in today's sources."""

from proofs.context_faults import FAULTS, ROOT
from tests.tables import over_table


@over_table("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_has_its_place(fault):
    """After a change of the attention cores, seven of them had none."""
    assert (ROOT / "megazero" / fault.file).read_text(encoding="utf-8").count(fault.before) == 1
    assert fault.after != fault.before
