"""Clients of a server as bare sockets, for `benchmarks.serve`.

    python benchmarks/stream_client.py PORT CONNECTIONS TOKENS REQUESTS

Each connection sends a request and reads its answer, until there were REQUESTS in all. Prints a line at the start, and
at the end the tokens, the events and the CPU time of this process as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass

TOKEN = b"tide "


@dataclass(slots=True)
class StreamCounts:
    """What the clients have read."""

    tokens: int = 0
    events: int = 0
    answers: int = 0


def request(tokens: int) -> bytes:
    """A completion of `tokens` streamed tokens; with 0 one token in one answer."""
    body = json.dumps({"model": "stand-in", "prompt": "x", "max_tokens": max(tokens, 1), "stream": tokens > 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def run(port: int, connections: int, tokens: int, requests: int) -> StreamCounts:
    """Send all requests and read all answers."""
    counts, data = StreamCounts(), request(tokens)
    end = b"data: [DONE]" if tokens else b'"usage"'
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    sent = 0
    for _ in range(min(connections, requests)):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
        sent += 1
    while counts.answers < requests:
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            read = connection.recv(1 << 16)
            if not read:
                raise ConnectionError("the server closed a connection")
            counts.tokens += read.count(TOKEN)
            counts.events += read.count(b'"text":"')
            tails[connection] = (tails[connection] + read)[-200:]
            if end in tails[connection]:
                tails[connection] = b""
                counts.answers += 1
                if sent < requests:
                    connection.sendall(data)
                    sent += 1
    return counts


if __name__ == "__main__":
    print("started", flush=True)
    began = time.process_time()
    found = run(*map(int, sys.argv[1:]))
    seconds = time.process_time() - began
    print(json.dumps({"tokens": found.tokens, "events": found.events, "client_s": seconds}), flush=True)
