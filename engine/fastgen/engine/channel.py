"""The clients of the engine process: the sockets, requests and reports of each API process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from fastgen.link.messages import Command, Failed, Loading, Ready, StepReport, TokenOutput

# Unread reports per client before sending blocks. A server that leaves so many unread has stopped reading.
_SEND_QUEUE = 10_000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that is no valid command.

    Attributes:
        fault: why, in one line.
        request_id: id of the request that it would have started, if it is an `Add`.
    """

    fault: str
    request_id: str | None


class Recipients:
    """Tracks each client's requests, and splits reports among the clients, which are numbered from 0.

    Attributes:
        present: numbers of the clients that have not exited.
    """

    def __init__(self, num_clients: int) -> None:
        self.present = list(range(num_clients))
        self._is_one = num_clients == 1  # then all requests are its own, and none is recorded
        self._watching: set[int] = set()
        self._owner: dict[str, int] = {}  # client by request

    @property
    def is_watched(self) -> bool:
        """Whether any client watches steps."""
        return bool(self._watching)

    def open(self, request_id: str, client: int) -> None:
        """Record that a client has started a request."""
        if not self._is_one:
            self._owner[request_id] = client

    def close(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._owner.pop(request_id, None)

    def watch(self, client: int, *, on: bool) -> None:
        """Record whether a client watches steps."""
        (self._watching.add if on else self._watching.discard)(client)

    def leave(self, client: int) -> list[str]:
        """Forget a client that has exited; return its requests."""
        self.present.remove(client)
        self._watching.discard(client)
        requests = [request_id for request_id, owner in self._owner.items() if owner == client]
        for request_id in requests:
            del self._owner[request_id]
        return requests

    def split(self, report: StepReport) -> Iterator[tuple[int, StepReport]]:
        """Yield each client with its part of a report: its own outputs, and the trace if it watches."""
        if self._is_one:
            yield 0, report
            return
        outputs: dict[int, list[TokenOutput]] = {client: [] for client in self.present}
        for output in report.outputs:
            owner = self._owner.get(output.request_id)
            if owner is None:  # its client has exited or cancelled it
                continue
            if output.finish_reason is not None:
                del self._owner[output.request_id]
            outputs[owner].append(output)
        for client, own in outputs.items():
            trace = report.trace if client in self._watching else None
            yield client, msgspec.structs.replace(report, outputs=own, trace=trace)


class Channel:
    """The engine's ends of the socket pairs, one per client."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._sockets = [_connect(address) for address in addresses]
        self._client = {socket: client for client, socket in enumerate(self._sockets)}
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self.clients = Recipients(len(self._sockets))

    def send(self, event: Loading | Ready | Failed) -> None:
        """Send one event to all clients."""
        encoded = self._encoder.encode(event)
        for client in self.clients.present:
            self._sockets[client].send(encoded)

    def report(self, report: StepReport) -> None:
        """Send each client its part of a report."""
        for client, part in self.clients.split(report):
            self._sockets[client].send(self._encoder.encode(part))

    def receive(self, *, wait: float | None) -> list[tuple[int, Command | Unreadable]]:
        """Return all pending commands with their clients, those of one client in order.

        Waits at most `wait` seconds for the first one, or without limit if it is None.
        """
        commands: list[tuple[int, Command | Unreadable]] = []
        for socket, _ in self._poller.poll(None if wait is None else round(wait * 1000)):
            while socket.poll(0, zmq.POLLIN):
                commands.append((self._client[socket], self._read(socket.recv())))
        return commands

    def _read(self, message: bytes) -> Command | Unreadable:
        try:
            return self._decoder.decode(message)
        except Exception as error:  # whatever the types of its values make of them
            return Unreadable(f"{type(error).__name__}: {error}", _started_request(message))

    def leave(self, client: int) -> list[str]:
        """Close the socket of a client that has exited; return its requests."""
        self._poller.unregister(self._sockets[client])
        self._sockets[client].close(linger=0)
        return self.clients.leave(client)


class _Identified(msgspec.Struct):
    id: str


class _AnyAdd(msgspec.Struct, tag="add"):
    """What is needed of an `Add` to end its request."""

    request: _Identified


def _started_request(message: bytes) -> str | None:
    """Return the id of the request that an unreadable message would have started, if it has one."""
    try:
        return msgspec.msgpack.decode(message, type=_AnyAdd).request.id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _connect(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, _SEND_QUEUE)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    return socket
