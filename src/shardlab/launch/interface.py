"""Which network interface leads to another machine: gloo is told by name, or else looks up the host's own name, which
need not resolve, or resolves to the loopback, where no other machine finds it."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address


def towards(address: str) -> str | None:
    """The name of the interface through which this machine reaches `address`, a name or an IPv4 address; None where
    there is no route, or the system is not Linux. No packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # of a datagram socket: it looks up the route, and that is all
        return named(probe.getsockname()[0])
    return None


def named(address: str) -> str | None:
    """The interface that has the IPv4 `address`; any of the loopback's is lo's."""
    if sys.platform != "linux":
        return None
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in addresses().items() if own == address), None)


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by its name; {} where the system is not Linux."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
