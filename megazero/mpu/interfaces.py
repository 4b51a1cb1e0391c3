"""The network interface that Gloo listens on.

Gloo takes the one that this host's name stands for. On hosts of Debian's kind the name stands for 127.0.1.1,
where no other host reaches it, and the job ends in its first call between hosts.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping

GLOO = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Have Gloo use the interface that reaches MASTER_ADDR, if this host's name stands for the host alone.

    An interface that the environment names already stays, and so does everything on a single host.
    """
    first = environment.get("MASTER_ADDR", "")
    if not first or GLOO in environment or _is_local(first) or not _is_local(socket.gethostname()):
        return
    name = interface_to(first)
    if name is not None:
        environment[GLOO] = name


def interface_to(host: str) -> str | None:
    """The interface from which packets to a host leave; None if none does, or not by IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a route is looked up, and nothing is sent
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == own), None)


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()))
    except OSError:
        return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def _is_local(host: str) -> bool:
    """Whether a name stands for addresses of this host that no other one reaches, or for none."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
