"""Environment variables of NCCL, torch and CUDA whose values make a training slow, silent or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megazero.env.facts import Environment, Problem

_ON = ("1", "true", "yes", "on")
_LOCAL_INTERFACES = ("lo", "docker")


@dataclass(frozen=True)
class BadVariable:
    """A variable with values that are known to be bad.

    Attributes:
        name: the variable.
        bad: whether a value, in lower case, is bad.
        why: the effect of a bad value.
        where: whether it matters on a machine.
    """

    name: str
    bad: Callable[[str], bool]
    why: str
    where: Callable[[Environment], bool] = lambda env: True


def _is_on(value: str) -> bool:
    return value in _ON


def _has_ports(env: Environment) -> bool:
    return bool(env.node.ports)


_GPUS: Callable[[Environment], bool] = lambda env: bool(env.gpus)  # noqa: E731

BAD_VARIABLES: tuple[BadVariable, ...] = (
    BadVariable(
        "NCCL_P2P_DISABLE", _is_on, "GPUs of a host then talk through its memory, not by NVLink", _GPUS
    ),
    BadVariable("NCCL_SHM_DISABLE", _is_on, "ranks of a host then talk over its network", _GPUS),
    BadVariable("NCCL_IB_DISABLE", _is_on, "messages between nodes then go over TCP", _has_ports),
    BadVariable(
        "NCCL_NET_GDR_LEVEL", lambda v: v in ("0", "loc"), "NICs then do not read GPUs' memory", _has_ports
    ),
    BadVariable(
        "NCCL_PROTO",
        lambda v: "ll128" in v and not v.startswith("^"),
        "LL128 on hardware that does not order its 128-byte stores corrupts data, so NCCL has to choose",
        _GPUS,
    ),
    BadVariable("NCCL_ALGO", bool, "one algorithm for all sizes is slow for most; NCCL has to choose", _GPUS),
    BadVariable("NCCL_DEBUG", lambda v: v == "trace", "a line for each call of each rank fills disks"),
    BadVariable("NCCL_CUMEM_ENABLE", lambda v: v == "0", "NVLink SHARP needs it on", _GPUS),
    BadVariable("NCCL_NVLS_ENABLE", lambda v: v == "0", "switches then reduce nothing", _GPUS),
    BadVariable("NCCL_BLOCKING_WAIT", _is_on, "the host then waits for each call"),
    BadVariable("TORCH_NCCL_BLOCKING_WAIT", _is_on, "the host then waits for each call"),
    BadVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", lambda v: v == "0", "a rank that hangs is then never noticed"
    ),
    BadVariable(
        "TORCH_DISTRIBUTED_DEBUG", lambda v: v == "detail", "each call is then checked by another one"
    ),
    BadVariable("CUDA_LAUNCH_BLOCKING", _is_on, "the host then waits for each kernel"),
    BadVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "each tensor is then allocated by the driver"),
)
"""From NVIDIA's and torch's documentation, and from reports of users."""


def variable_problems(env: Environment) -> Iterator[Problem]:
    """Variables with bad values, or with names of devices that do not exist."""
    for row in BAD_VARIABLES:
        value = env.variables.get(row.name)
        if value is not None and row.bad(value.lower()) and row.where(env):
            yield Problem(
                f"variable_{row.name.lower()}",
                f"`{row.name}` must be left out of a training, but is {value}: {row.why}",
                f"run `unset {row.name}`",
            )
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        yield from _interfaces(env, name)
    yield from _adapters(env)


def _interfaces(env: Environment, variable: str) -> Iterator[Problem]:
    """The problems of a variable that names interfaces: by prefix, with "=" exactly, with "^" to exclude."""
    value = env.variables.get(variable, "")
    if not value or value.startswith("^") or not env.interfaces:
        return
    exact = value.startswith("=") or variable.startswith("GLOO")
    wanted = value.lstrip("=").split(",")
    known = list(env.interfaces)
    matching = [
        name for name in known for word in wanted if name == word or (not exact and name.startswith(word))
    ]
    if not matching:
        yield Problem(
            "no_such_interface",
            f"`{variable}` must name a network interface of this host ({', '.join(known)}), but is {value}",
            "name one that all hosts have, or leave it out",
            stops=True,
        )
    elif all(name.startswith(_LOCAL_INTERFACES) for name in matching):
        yield Problem(
            "local_interface",
            f"`{variable}` must name an interface that other hosts reach, but names {', '.join(matching)}",
            "name the network between the hosts, unless the job has one host",
        )


def _adapters(env: Environment) -> Iterator[Problem]:
    value = env.variables.get("NCCL_IB_HCA", "")
    if not value or value.startswith("^") or not env.node.ports:
        return
    devices = sorted({port.name.partition(" ")[0] for port in env.node.ports})
    words = [word.partition(":")[0] for word in value.lstrip("=").split(",")]
    if not any(device.startswith(word) for device in devices for word in words):
        yield Problem(
            "no_such_adapter",
            f"`NCCL_IB_HCA` must name an RDMA device of this host ({', '.join(devices)}), but is {value}",
            "correct it: messages between nodes otherwise go over TCP",
        )
