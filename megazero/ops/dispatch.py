"""The seam between an operator and its kernels: a table of implementations, tried from the top.

An operator is a value: its name and a tuple of `Implementation`s, fastest first, the plain reference last.
The facts of a call are a value too, its `CallFacts`. Which code runs is a pure function of the two and
nothing else, so it can be looked up (`explain`) as well as used: an implementation never passes a call on to
another one. A new kernel adds one row and changes nothing else.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megazero.ops.example import Example

DEVICES = ("cpu", "cuda")
CPU, CUDA, META = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"meta"})
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
TRAINING_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

_Facts = TypeVar("_Facts", bound="CallFacts")
_Fn = TypeVar("_Fn", bound=Callable[..., object])  # the signature that an operator's implementations share


@dataclass(frozen=True)
class CallFacts:
    """The facts that decide which implementation runs; an operator's own facts are fields of a subclass.

    Attributes:
        device: the type of the device that the tensors are on.
        dtype: the dtype of the operator's first tensor.
    """

    device: str
    dtype: torch.dtype

    @classmethod
    def of(cls: type[_Facts], tensor: Tensor, **own: object) -> _Facts:
        """The facts of a call whose first tensor is `tensor`; `own` holds the subclass's fields."""
        return cls(tensor.device.type, tensor.dtype, **own)


def kinds_of_calls(facts: type[CallFacts] = CallFacts, **own: Iterable[Any]) -> tuple[CallFacts, ...]:
    """All combinations of device, dtype and the listed values of `facts`'s own fields."""
    dtypes = sorted(FLOATS, key=str)
    return tuple(
        facts(device, dtype, **dict(zip(own, values, strict=True)))
        for device, dtype, *values in itertools.product(DEVICES, dtypes, *own.values())
    )


def always() -> bool:
    """Return True: for an implementation that needs nothing built."""
    return True


def everything(facts: CallFacts) -> bool:
    """Return True: for an implementation that handles any call."""
    return True


@dataclass(frozen=True)
class Requirement:
    """One requirement of a call, and the reason if the call fails it: "serves cpu only", "is not built"."""

    met: Callable[[Any], bool]  # of the operator's own kind of facts
    otherwise: str


@dataclass(frozen=True)
class Requirements:
    """A predicate over calls that can tell which of its requirements a call fails."""

    requirements: tuple[Requirement, ...]

    def __call__(self, facts: CallFacts) -> bool:
        for requirement in self.requirements:  # noqa: SIM110 -- a generator takes a microsecond
            if not requirement.met(facts):
                return False
        return True

    def unmet(self, facts: CallFacts) -> str | None:
        """The reason why a call is not served, or None if it is."""
        unmet = (one.otherwise for one in self.requirements if not one.met(facts))
        return next(unmet, None)

    def needing(self, *further: Requirement) -> Requirements:
        """The same requirements and further ones."""
        return Requirements((*self.requirements, *further))


def where(
    devices: frozenset[str] | None = None,
    dtypes: frozenset[torch.dtype] | None = None,
    built: Callable[[], bool] = always,
    **own: object,
) -> Requirements:
    """The requirements of an implementation: devices, dtypes (None: any), values of facts, being built."""
    requirements = []
    if devices is not None:
        requirements.append(
            Requirement(lambda facts: facts.device in devices, f"serves {_names(devices)} only")
        )
    if dtypes is not None:
        requirements.append(Requirement(lambda facts: facts.dtype in dtypes, f"serves {_names(dtypes)} only"))
    for name, value in own.items():
        requirements.append(Requirement(_has(name, value), f"serves {name}={_text(value)} only"))
    if built is not always:
        requirements.append(Requirement(lambda facts: built(), "is not built"))
    return Requirements(tuple(requirements))


def _has(name: str, value: object) -> Callable[[CallFacts], bool]:
    return lambda facts: getattr(facts, name) == value


def _names(choices: Iterable[object]) -> str:
    return ", ".join(sorted(map(_text, choices)))


@dataclass(frozen=True)
class Implementation(Generic[_Fn]):
    """One way to compute an operator, and a predicate that says which calls it handles.

    Attributes:
        traceable: whether torch.compile can look into it; a reference always is.
    """

    name: str
    fn: _Fn
    serves: Callable[[CallFacts], bool] = everything
    traceable: bool = False

    def unmet(self, facts: CallFacts) -> str | None:
        """The reason why it does not serve such a call, or None if it does."""
        if isinstance(self.serves, Requirements):
            return self.serves.unmet(facts)
        return None if self.serves(facts) else "does not serve such calls"


@dataclass(frozen=True)
class Operator(Generic[_Fn]):
    """The table behind a public function; the last implementation is the reference, which defines the result.

    Attributes:
        name: the operator's name.
        implementations: the implementations, in the order in which they are tried.
        calls: one call of each kind that the choice may distinguish, for `explain`.
        examples: makes examples of its calls, for tests and the kernels' report; the first is a plain one.
        differentiable: whether autograd goes through it; otherwise another operator is its backward.
    """

    name: str
    implementations: tuple[Implementation[_Fn], ...]
    calls: tuple[CallFacts, ...] = kinds_of_calls()
    examples: Callable[[], Iterable[Example]] = tuple
    differentiable: bool = True

    def __post_init__(self) -> None:
        last = self.implementations[-1]
        assert last.name == "reference", f"{self.name}: the last implementation must be the reference"
        assert last.serves is everything, f"{self.name}: the reference must handle every call"

    @property
    def reference(self) -> _Fn:
        """The formula in plain torch."""
        return self.implementations[-1].fn

    def choose(self, facts: CallFacts, *, traced: bool = False) -> Implementation[_Fn]:
        """The implementation that runs for such a call: the first that handles it.

        Within what torch.compile traces, which `traced` asks about, it is the first that the compiler can
        look into and fuse with its neighbours.
        """
        candidates = self.implementations
        if traced or torch.compiler.is_compiling():
            candidates = (*(row for row in candidates if row.traceable), candidates[-1])
        for row in candidates:
            if row.serves(facts):
                return row
        raise AssertionError(f"{self.name}: the reference must serve every call")

    def passed_over(self, facts: CallFacts) -> tuple[tuple[str, str], ...]:
        """The implementations above the chosen one, with the reason why each does not run for such a call."""
        chosen = self.choose(facts)
        above = itertools.takewhile(lambda row: row is not chosen, self.implementations)
        return tuple((row.name, row.unmet(facts) or "is not traceable") for row in above)

    def kinds(self) -> dict[CallFacts, str]:
        """The facts of each of `calls` that change the choice on its device, in words.

        The text is like ``dropout=True, lse=False``; it is empty where device and dtype decide alone.
        """
        kinds = {}
        for device in DEVICES:
            chosen = {call: self.choose(call).name for call in self.calls if call.device == device}
            deciding = [name for name in _own_fields(self.calls[0]) if _changes_the_choice(name, chosen)]
            for call in chosen:
                kinds[call] = ", ".join(f"{field}={_text(getattr(call, field))}" for field in deciding)
        return kinds


def explain(operator: Operator[Any]) -> str:
    """The implementation that runs for each call: one line per device type, with dtypes grouped.

    If the operator's own facts change the choice, a device has one line per combination, which names them.
    Example: `attention on cpu, dropout=True: native_cpu (bfloat16, float32), composed (float16), ...`.
    """
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for call, kind in operator.kinds().items():
        dtypes = groups.setdefault((call.device, kind), {}).setdefault(operator.choose(call).name, [])
        if _text(call.dtype) not in dtypes:
            dtypes.append(_text(call.dtype))
    lines = []
    for (device, kind), by_name in sorted(groups.items()):
        choices = ", ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in by_name.items())
        lines.append(f"{operator.name} on {device}{kind and ', ' + kind}: {choices}")
    return "\n".join(lines)


def _own_fields(facts: CallFacts) -> list[str]:
    shared = {field.name for field in fields(CallFacts)}
    return [field.name for field in fields(facts) if field.name not in shared]


def _changes_the_choice(field: str, chosen: dict[CallFacts, str]) -> bool:
    """Whether two calls that differ in this field alone are computed by different implementations."""
    names: dict[CallFacts, set[str]] = {}
    unset: dict[str, Any] = {field: None}
    for call, name in chosen.items():
        names.setdefault(replace(call, **unset), set()).add(name)
    return any(len(alternatives) > 1 for alternatives in names.values())


def _text(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value).removeprefix("torch.")
