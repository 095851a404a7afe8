"""A broker that says to one engine what a test wants."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pagetide.allocator import wire
from pagetide.allocator.broker_socket import listen
from pagetide.allocator.lease_record import RecordOwner


class FalseBroker:
    """Says to one engine what a test wants."""

    def __init__(self, path: Path) -> None:
        self._listener = listen(path)
        self._listener.settimeout(60)
        self._decoder = wire.message_reader()

    def accept(self) -> None:
        """Accept an engine, and say nothing."""
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(30)

    def serve(self, granted: int = 500) -> None:
        """Accept an engine and register it."""
        self.accept()
        assert self.hear() == wire.HelloMessage(wire.PROTOCOL)
        self.say(wire.WelcomeMessage(wire.PROTOCOL, 7, 1))
        request = self.hear()
        assert isinstance(request, wire.RegisterMessage)
        self.request = request
        self.record = RecordOwner(request.held_bytes)
        fd = self.record.take_fd()
        frame = wire.to_frame(wire.RegisteredMessage(1, wire.OrderGeneration(7, 100), granted))
        socket.send_fds(self.socket, [frame], [fd])
        os.close(fd)

    def say(self, *messages: wire.FromBroker) -> None:
        for message in messages:
            self.socket.send(wire.to_frame(message))

    def hear(self) -> wire.Message:
        while True:  # a byte at a time: none of the next message is taken
            for message in self._decoder.feed(self.socket.recv(1)):
                return message

    def close(self) -> None:
        self._listener.close()
        self.socket.close()
