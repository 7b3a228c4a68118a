"""Network interfaces and their IPv4 addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

from ...checks import short
from ..process import LaunchError

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface or host name; return an address unchanged.

    Raises
    ------
    LaunchError
        There is no such interface or host.

    Examples
    --------
    >>> address_of("lo")
    '127.0.0.1'
    """
    address = _address(interface)
    if address:
        return address
    try:
        return str(socket.getaddrinfo(interface, None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise LaunchError(
            f"launch: got {short(interface)} ({error}); expected an interface, a host or an IPv4 address. This machine has "
            f"{names}."
        ) from None


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; "" if there is none.

    Examples
    --------
    >>> interface_of("127.0.0.1")
    'lo'
    """
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), "")


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode(errors="replace")[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(packed[20:24])
