"""One example per kernel: a call of the size at which kernels are judged, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megazero.kernels import KernelLibrary


@dataclass(frozen=True)
class KernelCase:
    """A call of an operator by its kernels, forward and backward.

    Attributes:
        name: name of the operator, with its dtype: `rms_norm bf16`.
        run: makes the tensors and the call, by the library that it is given.
        must_move: kernel -> the bytes that any implementation reads and writes, each once: inputs, outputs
            and what is saved for backward.
        scattered: kernels whose accesses follow indices from the data -> why their sectors are not ideal.
    """

    name: str
    run: Callable[[KernelLibrary], object]
    must_move: Mapping[str, int]
    scattered: Mapping[str, str] = field(default_factory=dict)
