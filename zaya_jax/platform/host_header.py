"""Checks the Host header of requests, which protects a server without a key against DNS rebinding.

A hostile site can point its own domain name at this machine. A browser then lets the site's page read the
server's responses, but still sends the site's name in the Host header.
"""

import ipaddress
import re
from collections.abc import Collection

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HEADER = re.compile(
    r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::(?P<port>[0-9]{0,5}))?"
)
"""`uri-host [":" port]` of RFC 9110, section 7.2, restricted to the characters of real host names."""


def parse_host(header: str) -> str | None:
    """Returns the host that a Host header names, in lower case, without its port and brackets.

    Args:
      header: value of the header.

    Returns:
      The host; None if the whole header does not have the form HOST or HOST:PORT.
    """
    match = _HEADER.fullmatch(header)
    if match is None or int(match["port"] or 0) >= 2**16:
        return None
    if match["name"] is not None:
        return match["name"].lower()
    try:
        return str(ipaddress.IPv6Address(match["address"]))
    except ValueError:
        return None


def is_address(host: str) -> bool:
    """Whether a host is an IP address, which no site can use for DNS rebinding."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_allowed(header: str, names: Collection[str]) -> bool:
    """Whether a Host header names the loopback interface or one of a server's own names.

    Args:
      header: value of the header.
      names: additional names and addresses of this server, in lower case and without ports.
    """
    host = parse_host(header)
    return host is not None and (host in LOOPBACK or host in names)
