"""Listening sockets of the server, and how many connections it may have."""

from __future__ import annotations

import os
import resource
import socket

from fastgen.settings import ConfigError

# TCP timeout for a peer that acknowledges nothing.
_PEER_TIMEOUT_SECONDS = 120
_MAX_OPEN_FILES = 65536


# All addresses of both families: which one a pod is reached at depends on the cluster.
ALL_ADDRESSES = "::"


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Return one listening socket per API process.

    The kernel distributes connections between the sockets by the client's address and port. With one socket for all,
    the process that is woken first would get a burst of connections.

    Args:
        host: address to listen on. Without IPv6 on the machine, `ALL_ADDRESSES` means all IPv4 addresses.
        port: port to listen on; 0 chooses a free one.
        count: number of API processes.

    Raises:
        ConfigError: if the address cannot be used, or another server uses it.
    """
    first = _listener(host, port, shared=False)
    if count == 1:
        return [first]
    # The first one has shown that no other server has the port: sharing it would not be refused.
    port = first.getsockname()[1]
    first.close()
    return [_listener(host, port, shared=True) for _ in range(count)]


def _listener(host: str, port: int, *, shared: bool) -> socket.socket:
    bound, both = host, host == ALL_ADDRESSES
    if both and not socket.has_dualstack_ipv6():
        bound, both = "0.0.0.0", False
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    try:
        listener = socket.create_server(
            (bound, port), family=family, backlog=2048, reuse_port=shared, dualstack_ipv6=both
        )
    except OSError as error:
        # Python appends the address to strerror; name resolution errors have their own text.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise ConfigError(f"--host {host} --port {port}: {reason}; choose another address or port") from None
    except OverflowError:
        raise ConfigError(f"--port {port}: must be from 0 to 65535") from None
    # Connections inherit these options. Without them, a client whose machine or network vanished would hold its
    # sequence, and a drain, until the end.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PEER_TIMEOUT_SECONDS // 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PEER_TIMEOUT_SECONDS // 8)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_TIMEOUT_SECONDS * 1000)
    return listener


def allow_many_connections() -> None:
    """Raise the limit on open files.

    Each connection needs one, and the usual 1024 are fewer than the connections that the server accepts.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if highest == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, highest)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
