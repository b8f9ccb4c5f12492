"""Limits of a request besides its body, in bytes and seconds, tested with raw sockets."""

import asyncio
import json
import socket

import httpx
import psutil
import pytest

pytest.importorskip("uvicorn")

from server import DEMO

from pykvedge.serve import protocol
from pykvedge.serve.protocol import CONNECTIONS, WAITING

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MUCH = b"a" * (1 << 20)
SERVED = ("--model", DEMO / "demo-model.gguf", "--mmproj", DEMO / "demo-mmproj.gguf", "--ctx", "512")


def said(server, *parts):
    """Sends the parts. Returns the status of the answer."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as one:
        for part in parts:
            one.sendall(part)
        return int(one.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET /" + MUCH,), (HEAD + b"X: " + MUCH,), (HEAD + b"X" + MUCH,), (HEAD + b"X: a\r\n" * 200_000,),
        (HEAD, *[b"X: a\r\n" * 10_000] * 20), (CHUNKED + b"1;" + MUCH,), (CHUNKED + b"1\r\n{\r\n0\r\nX: " + MUCH,),
        (CHUNKED + b"0" * (1 << 20),), (b"GET / HTTP/9.9\r\n\r\n",), (b"\x16\x03\x01" + MUCH,), (b"GET\r\n\r\n",),
        (HEAD + b"Content-Length: -1\r\n\r\n",), (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",), (CHUNKED + b"zz\r\n",),
    ],
)  # fmt: skip
def test_what_is_too_much_or_no_http_is_refused(server, parts):
    assert said(server, *parts) == 400
    assert server.client.get("/health").json()["status"] == "ok"


def test_a_body_in_the_smallest_chunks_is_taken(server):
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 1}).encode()
    body += b" " * (200_000 - len(body))
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert said(server, CHUNKED + chunks + b"0\r\n\r\n") == 200
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers={"X": "a" * 60_000})
    assert answer.status_code == 200


def test_requests_may_follow_each_other_without_waiting(server):
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        one.sendall((asked + b"\r\n") * 99 + asked + b"Connection: close\r\n\r\n")
        assert one.makefile("rb").read().count(b"HTTP/1.1 200") == 100


def read_out(connection):
    """Reads until the server has closed a connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [b"GET / HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 9\r\n\r\n{", HEALTH, b""],
    ids=["headers", "bodies", "idle", "nothing"],
)  # fmt: skip
def test_connections_that_wait_keep_nobody_out(server, begun):
    """The oldest waiting connections are closed, so that a complete request is answered."""
    port = int(server.url.rpartition(":")[2])
    left = []
    try:
        for _ in range(CONNECTIONS + 20):
            one = socket.create_connection(("127.0.0.1", port), timeout=60)
            left.append(one)
            one.sendall(begun)
            if begun == HEALTH:
                data = b""
                while b"uptime" not in data:
                    data += one.recv(4096)
        with httpx.Client(base_url=server.url, timeout=60) as fresh:
            assert fresh.get("/health").status_code == 200
            answer = fresh.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            assert answer.status_code == 200
        open_handles = psutil.Process(server.process.pid).num_fds() if hasattr(psutil.Process, "num_fds") else 0
        assert open_handles < WAITING + 100
        read_out(left[0])
        left[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            left[-1].recv(1)  # the last connection is still open
    finally:
        for one in left:
            one.close()


def test_headers_that_do_not_end_end_the_connection(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run():
        import uvicorn

        config = uvicorn.Config(app, http=protocol.Protocol, ws="none", lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        state = uvicorn.Server(config).server_state
        server = await loop.create_server(lambda: protocol.Protocol(config, state, {}, waiting={}), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        reads = []
        for first in (b"", HEAD, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(first)
            try:
                reads.append(await asyncio.wait_for(reader.read(), 30))
            except ConnectionError:
                reads.append(b"")
            writer.close()
        server.close()
        return reads

    silent, begun, answered = asyncio.run(run())
    assert silent == begun == b""
    assert answered.startswith(b"HTTP/1.1 200")
