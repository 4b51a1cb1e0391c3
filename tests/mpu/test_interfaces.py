"""Gloo on hosts whose name stands for themselves alone."""

from __future__ import annotations

import socket

import pytest

from megazero.mpu import interfaces
from megazero.mpu.interfaces import choose_interface, interface_to

ADDRESSES = {"debian": "127.0.1.1", "node0": "10.0.0.1", "node1": "10.0.0.2", "localhost": "127.0.0.1"}


def test_packets_to_this_host_leave_by_its_own_interface():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None


@pytest.mark.parametrize(
    ("own", "environment", "chosen"),
    [
        ("debian", {"MASTER_ADDR": "node0"}, "eth7"),
        ("node1", {"MASTER_ADDR": "node0"}, None),
        ("debian", {"MASTER_ADDR": "localhost"}, None),
        ("debian", {}, None),
        ("debian", {"MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_the_interface_that_reaches_the_first_rank_is_used(monkeypatch, own, environment, chosen):
    """Nothing else connects such hosts: their ranks wait at 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(0, 0, 0, "", (ADDRESSES[host], 0))])
    monkeypatch.setattr(interfaces, "interface_to", {"node0": "eth7"}.get)
    choose_interface(environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == chosen
