"""stage_runtime.addresses: which addresses are understood, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage_runtime.addresses import TcpAddress, UnixAddress, parse, resolve
from stage_runtime.config import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("dns:53", TcpAddress("dns", 53)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
        ("unix:/run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("unix:///run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("unix:a.sock", UnixAddress(Path.cwd() / "a.sock")),
        ("unix://a.sock", UnixAddress(Path.cwd() / "a.sock")),
    ],
)
def test_addresses_are_read(text: str, address: object) -> None:
    """Every documented form."""
    assert parse(text) == address


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "[::1]:1", "unix:/run/a.sock"])
def test_addresses_are_written_as_they_are_read(text: str) -> None:
    """The text form, which also is what gRPC understands."""
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no host:port"),
        ("localhost", "no host:port"),
        (":50051", "no host:port"),
        ("::1:50051", "for IPv6"),
        ("localhost:http", "'http'; it must be a number from 0 to 65535"),
        ("localhost:", "''; it must be a number"),
        ("localhost:65536", "'65536'"),
        ("localhost:-1", "'-1'"),
        ("localhost:٣", "must be a number"),
        ("unix:", "names no socket"),
        ("unix://", "names no socket"),
        ("unix:/run/100%.sock", "'%'"),
        ("unix:/run/a\0b", "unprintable"),
        ("unix:/run/" + "x" * 120, "125 bytes; Unix sockets allow 107"),
        ("unix:/run/" + "ö" * 60, "125 bytes"),
        ("dns:///codec:50051", "cannot be listened on"),
        ("unix-abstract:name", "cannot be listened on"),
        ("ipv4:127.0.0.1:80", "cannot be listened on"),
        ("http://localhost:80", "cannot be listened on"),
    ],
)
def test_faulty_addresses_are_refused_with_the_reason(text: str, said: str) -> None:
    """The message says what is wrong and what would be right."""
    with pytest.raises(ConfigError) as caught:
        parse(text)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (TcpAddress("host.invalid", 80), "'host.invalid' is unknown"),
        (TcpAddress("192.0.2.1", 0), "no address of this machine"),
        (TcpAddress("x" * 300, 80), "is unknown"),
    ],
    ids=["unknown name", "another machine", "too long a name"],
)
def test_hosts_that_are_not_ours_are_refused(address: TcpAddress, said: str) -> None:
    """Before gRPC gets to see them."""
    with pytest.raises(ConfigError) as caught:
        resolve(address)

    assert said in str(caught.value)
