"""IPv4 addresses of this machine and of node 0, free ports, and free names of Unix sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import struct
from typing import List, Tuple

from ...checks import short
from ..process import LaunchError
from .job import Job

_SIOCGIFADDR = 0x8915


def parse_master(text: str) -> Tuple[str, int]:
    """Return host and port of `host:port`.

    Raises
    ------
    LaunchError
        The text has another form.

    Examples
    --------
    >>> parse_master("node0:29400")
    ('node0', 29400)
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or not 0 < int(port) < 65536:
        raise LaunchError(f"launch: got --master {short(text)}; expected HOST:PORT. Name node 0 and a port that is free there.")
    return host, int(port)


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
    try:
        return _address(interface) or str(socket.getaddrinfo(interface, None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
        what = f"got {short(interface)} ({error}); expected an interface, a host or an IPv4 address"
        raise LaunchError(f"launch: {what}. See ip address.") from None


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; "" if there is none.

    Examples
    --------
    >>> interface_of("127.0.0.1")
    'lo'
    """
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), "")


def find_addresses(job: Job) -> Tuple[str, str]:
    """Return the addresses of this machine and of node 0.

    Raises
    ------
    LaunchError
        Node 0 cannot be reached at its address.
    """
    named = job.master[0] if job.master and job.num_nodes > 1 else "127.0.0.1"
    root = address_of(named)
    if job.node_rank:
        return (address_of(job.interface) if job.interface else _address_towards(root)), root
    if root.startswith("127.") and not (job.interface or named == "localhost" or named.startswith("127.")):
        raise LaunchError(
            f"launch: got --master {named}, which is {root} on this machine; expected an address that other machines reach. "
            "Pass --interface."
        )
    host = address_of(job.interface or named)
    return host, host


def _address_towards(address: str) -> str:
    """Return the address of this machine from which it reaches another one; send nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return str(probe.getsockname()[0])


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Return a socket that holds a port of an address until it is closed: this one, or for 0 a free one.

    The socket does not listen. So ps-lite, which shares its port with sockets that do not listen, can bind to the port, and the
    kernel gives the port to no other process.

    Raises
    ------
    LaunchError
        The port is in use, or this machine does not have the address.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: above 65535
        held.close()
        where, expected = f"{host}:{port}" if port else host, "an address of this machine. Pass another --interface."
        if getattr(error, "errno", 0) != errno.EADDRNOTAVAIL:
            expected = "the port of --master and the next one to be free. Pass another on all machines; see ss -ltnp."
        raise LaunchError(f"launch: got {where} ({getattr(error, 'strerror', error)}); expected {expected}") from None
    return held


def unused_numbers(count: int) -> List[int]:
    """Return numbers for Unix sockets `/tmp/NUMBER`: no such file exists, and no other user can guess and take one.

    Raises
    ------
    LaunchError
        This user cannot write to `/tmp`.

    Examples
    --------
    >>> len(set(unused_numbers(3)))
    3
    """
    if not os.access("/tmp", os.W_OK | os.X_OK):
        raise LaunchError("launch: got /tmp, which cannot be written; expected a folder for sockets. Make it writable.")
    while True:
        numbers = secrets.SystemRandom().sample(range(10**9, 2**31), count)
        if not any(os.path.lexists(f"/tmp/{number}") for number in numbers):
            return numbers


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode(errors="replace")[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(packed[20:24])
