"""Host headers: one strict parser for all servers without a key."""

import pytest

from zaya_jax.platform.host_header import is_address, is_allowed, parse_host

GOOD = [
    ("localhost", "localhost"),
    ("LocalHost:8000", "localhost"),
    ("localhost:", "localhost"),  # RFC 3986 allows an empty port
    ("127.0.0.1", "127.0.0.1"),
    ("127.0.0.1:65535", "127.0.0.1"),
    ("[::1]", "::1"),
    ("[::1]:80", "::1"),
    ("[0:0:0:0:0:0:0:1]:80", "::1"),
]
BAD = [
    "",
    " ",
    ":",
    ":80",
    "[::1]evil",
    "[::1]evil.example:80",
    "[::1]:80evil",
    "[::1].evil.example",
    "[::1",
    "::1",
    "::1]",
    "[]",
    "[localhost]",
    "[127.0.0.1]",
    "[::1]]",
    "[[::1]]",
    "[::1%25lo]",
    "[::1%lo]",
    "x[::1]",
    "localhost:80:80",
    "localhost:80@evil.example",
    "user@localhost",
    "localhost@evil.example",
    "localhost/evil",
    "localhost,evil.example",
    "localhost evil",
    " localhost",
    "localhost ",
    "localhost\t",
    "localhost\n",
    "localhost\x00",
    "localhost#",
    "localhost?",
    "localhost:65536",
    "localhost:-1",
    "localhost:+80",
    "localhost:8 0",
    "localhost:\u0661",
    "localhost:999999",
    "localhost\\evil",
    "http://localhost",
    "localhost;",
    "*",
    "\uff4cocalhost",
    "loc\u212alhost",
]
OTHERS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "xlocalhost",
    "localhost.",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "127.0.0.1.",
    "0177.0.0.1",
    "0.0.0.0",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::2]:80",
    "10.0.0.7",
    "node7:9464",
]


@pytest.mark.parametrize(("header", "host"), GOOD)
def test_the_host_of_a_header(header, host):
    assert parse_host(header) == host
    assert is_allowed(header, [])


@pytest.mark.parametrize("header", BAD, ids=ascii)
def test_invalid_headers_are_refused(header):
    assert parse_host(header) is None
    assert not is_allowed(header, ["evil", "evil.example", "", "*"])


@pytest.mark.parametrize("header", OTHERS)
def test_other_hosts_are_refused(header):
    assert not is_allowed(header, [])
    assert is_allowed(header, [parse_host(header) or ""])


def test_addresses_and_names():
    assert [host for host in ("10.0.0.7", "::2", "node7", "127.1", "") if is_address(host)] == [
        "10.0.0.7",
        "::2",
    ]
