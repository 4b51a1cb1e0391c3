"""Groups of threads whose copies a meter of memory does not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.utils._python_dispatch import _disable_current_modes

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import DONE, Transfer, Work
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


class Unnoticed(WrappingGroup):
    """A group of threads, which copy and keep what they send; here a meter of memory does not see that."""

    def _collective(self, call: GroupCall) -> Work:
        with _disable_current_modes():
            first, *rest = call.arguments
            start = getattr(self.inner, call.operation)
            if call.operation in ("all_reduce", "broadcast"):
                copy = first.clone()
                start(copy, *rest).wait()
                first.copy_(copy)
            else:
                start(first, rest[0].clone(), *rest[1:]).wait()
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        with _disable_current_modes():
            copies = [replace(t, tensor=t.tensor.clone()) if t.kind == "send" else t for t in transfers]
            return self.inner.exchange(copies)


def unnoticed(context: ParallelContext) -> ParallelContext:
    """The same context of a thread, whose groups of more than one rank are such."""
    groups = {name: g if g.size == 1 else Unnoticed(g, name) for name, g in context.groups.items()}
    return replace(context, groups=groups)
