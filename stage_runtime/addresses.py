"""Addresses to listen on: "host:port" and "unix:path", and what guards them against a second server.

gRPC by itself lets a second server take over a Unix socket, and its end then deletes the socket of the first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stage_runtime.config import ConfigError, check_socket_path
from stage_runtime.file_lock import FileLock, file_id

_CONNECT_TIMEOUT_S = 0.5
# What gRPC knows to dial, and what people paste.
_SCHEME = re.compile(r"^([a-z]+://|(dns|ipv4|ipv6|unix-abstract|vsock|passthrough):(?!\d+$))")


class AddressInUse(ConfigError):
    """Another process listens on the address."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port, 0 for a free one, at a host name or IP address (IPv6 without brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket at an absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse(text: str) -> Address:
    """Read an address to listen on: "host:port", "[ipv6]:port", "unix:path" or "unix:///path". Raises ConfigError."""
    if text.startswith("unix:"):
        if text.rstrip("/") == "unix:":
            raise ConfigError(f"address {text!r} names no socket; write unix:/path/to/socket")
        path = Path(text.removeprefix("unix:").removeprefix("//")).absolute()
        check_socket_path(path)
        return UnixAddress(path)
    if _SCHEME.match(text):
        raise ConfigError(f"address {text!r} cannot be listened on; use host:port or unix:/path")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r} is no host:port ([address]:port for IPv6) and no unix:/path")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"address {text!r} has port {port!r}; it must be a number from 0 to 65535")
    return TcpAddress(host[1:-1] if bracketed else host, int(port))


def resolve(address: TcpAddress) -> list[str]:
    """IP addresses of this machine that `address` stands for, each checked to be free at that port; blocks for the name look-up.

    Raises:
        AddressInUse: Another process listens there.
        ConfigError: The host is unknown or not this machine's, or the port may not be used.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"address {address}: host {address.host!r} is unknown ({error})") from error
    here: list[str] = []
    away: OSError | None = None
    for family, _, _, _, place in dict.fromkeys(found):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Only a listening socket is in the way then, not connections that linger.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                away = error  # "localhost" without IPv6, say; another of its addresses may do
                continue
            raise _explain(address, error) from error
        here.append(str(place[0]))
    if not here:
        raise ConfigError(f"address {address}: {address.host!r} is no address of this machine ({away})") from away
    return here


def _explain(address: Address, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return in_use(address)
    if error.errno == errno.EACCES:
        return ConfigError(f"address {address}: this user may not listen there ({error.strerror})")
    return ConfigError(f"address {address} cannot be listened on: {error}")


def in_use(address: Address | str) -> AddressInUse:
    """The error for an address that is taken."""
    return AddressInUse(
        f"address {address} is in use: another process listens on it; stop it or choose another address"
    )


class SocketGuard:
    """Exclusive right to a Unix socket's path, held by a lock on `PATH.lock` until `release` or the end of the process.

    The lock decides between processes of this project. Of others, one that answers at the socket keeps it; a socket file that
    nobody answers at was left by a killed process and is removed.
    """

    def __init__(self, address: UnixAddress) -> None:
        """Raises AddressInUse if it is taken, ConfigError if the path cannot be used."""
        self._path = address.path
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(Path(f"{address.path}.lock"))
        except BlockingIOError:
            raise in_use(address) from None
        except OSError as error:
            raise ConfigError(f"address {address} cannot be listened on: {error}") from error
        self._socket_id: tuple[int, int] | None = None
        try:
            self._remove_stale(address)
        except BaseException:
            self.release()
            raise

    def bound(self) -> None:
        """Remember the socket file that was made just now, so that `release` removes no other."""
        self._socket_id = file_id(self._path)

    def release(self) -> None:
        """Remove the socket file, if it is still ours, and the lock. May be called again."""
        if self._socket_id is not None and file_id(self._path) == self._socket_id:
            self._path.unlink(missing_ok=True)
        self._socket_id = None
        self._lock.release()

    def _remove_stale(self, address: UnixAddress) -> None:
        try:
            kind = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise ConfigError(
                f"address {address}: {self._path} exists and is no socket; remove it or choose another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_TIMEOUT_S)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
            except FileNotFoundError:
                return
            except TimeoutError:
                raise in_use(address) from None  # alive, with a full queue of connections
            except OSError as error:
                raise _explain(address, error) from error
            else:
                raise in_use(address)


@contextlib.contextmanager
def socket_mode(mode: int) -> Iterator[None]:
    """Sockets that the body makes get these permissions from the start. Holds for the whole process meanwhile."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
