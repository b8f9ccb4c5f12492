"""A local model hub for huggingface_hub: repositories, files by checksum, and every kind of failure.

The server counts the bytes of the files that it sends. A test sets faults; a fault in a list is used once, others stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_BLOCK = 1 << 14


@dataclass
class StoredFile:
    """A file of a repository. large: a file of large file storage, whose checksum is a sha256."""

    data: bytes
    large: bool = True
    said: str | None = None  # a wrong checksum to report
    size: int | None = None  # a wrong size to report

    @property
    def checksum(self) -> str:
        if self.said:
            return self.said
        if self.large:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(f"blob {len(self.data)}\0".encode() + self.data).hexdigest()

    def listed(self, path: str) -> dict:
        size = len(self.data) if self.size is None else self.size
        entry = {"rfilename": path, "size": size, "blobId": "0" * 40 if self.large else self.checksum}
        if self.large:
            entry["lfs"] = {"sha256": self.checksum, "size": size, "pointerSize": 130}
        return entry


@dataclass
class Faults:
    """The faults of the next answers."""

    token: str | None = None  # required token of requests
    statuses: list[int] = field(default_factory=list)  # status codes of the next answers about files
    cut: list[int] = field(default_factory=list)  # after how many bytes the next answers with files break off
    no_ranges: bool = False  # ignore Range: always send the whole file
    shifted: int = 0  # number of bytes by which a part of a file begins too early
    past_the_end: bool = False  # refuse requests for a part of a file with 416
    silent_listing: bool = False  # send a listing that is not JSON
    hold: threading.Event | None = None  # an answer with a whole file waits at its middle for this event


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that left early is no fault
            super().handle_error(request, client_address)


class HubServer:
    """A hub that serves inside a `with` statement. `url` is its endpoint."""

    def __init__(self) -> None:
        self.counting = threading.Lock()
        self.forget()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def forget(self) -> None:
        """Removes repositories, faults and the record of requests."""
        self.repos: dict[str, dict[str, StoredFile]] = {}
        self.faults = Faults()
        self.sent: dict[str, int] = {}  # bytes sent of each file
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.strayed: list[str] = []  # paths of the storage that received a token
        self.halfway = threading.Event()  # set while an answer waits for faults.hold

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())

    def commit(self, repo: str) -> str:
        """Returns the commit id of the repository's present content."""
        named = sorted((path, file.checksum) for path, file in self.repos[repo].items())
        return hashlib.sha1(repr(named).encode()).hexdigest()

    def add(self, repo: str, path: str, data: bytes, **settings) -> StoredFile:
        file = StoredFile(data, **settings)
        self.repos.setdefault(repo, {})[path] = file
        return file

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self):
                answer(hub, self)

            def do_GET(self):
                answer(hub, self)

        return Handler


def answer(hub: HubServer, request: BaseHTTPRequestHandler) -> None:
    path, asked = unquote(urlsplit(request.path).path), request.headers.get("Range")
    hub.requests.append((request.command, path, asked))
    token = request.headers.get("Authorization")
    if found := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
        if token is not None:
            hub.strayed.append(path)
        send_file(hub, request, found[1], found[2], asked)
    elif hub.faults.token is not None and token != f"Bearer {hub.faults.token}":
        say(request, 401, {"error": "Invalid username or password."})
    elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/main", path):
        send_listing(hub, request, found[1])
    elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40}|main)/(.+)", path):
        send_place(hub, request, *found.groups())
    else:
        say(request, 404, {"error": "no such page"})


def say(request: BaseHTTPRequestHandler, status: int, what: object, **headers: str) -> None:
    body = what if isinstance(what, bytes) else json.dumps(what).encode()
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def send_listing(hub: HubServer, request: BaseHTTPRequestHandler, repo: str) -> None:
    if hub.faults.silent_listing:
        say(request, 200, b"<html>Welcome to this network</html>")
    elif repo not in hub.repos:
        say(request, 404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
    else:
        files = [file.listed(path) for path, file in hub.repos[repo].items()]
        say(request, 200, {"id": repo, "sha": hub.commit(repo), "siblings": files})


def send_place(hub: HubServer, request: BaseHTTPRequestHandler, repo: str, commit: str, path: str) -> None:
    """Answers with the location of a file. Large files are on another host name, as on real hubs."""
    file = hub.repos.get(repo, {}).get(path)
    if file is None or commit not in ("main", hub.commit(repo)):
        say(request, 404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        return
    size = len(file.data) if file.size is None else file.size
    facts = {"X_Repo_Commit": hub.commit(repo), "X_Linked_Size": str(size), "X_Linked_Etag": f'"{file.checksum}"'}
    if file.large:
        where = f"http://localhost:{hub.port}/storage/{repo}/{path}"
        say(request, 302, b"", Location=where, **facts)
    elif request.command == "HEAD":
        request.send_response(200)
        for name, value in {**facts, "ETag": f'"{file.checksum}"', "Content-Length": str(size)}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
    else:
        send_file(hub, request, repo, path, request.headers.get("Range"))


def send_file(hub: HubServer, request: BaseHTTPRequestHandler, repo: str, path: str, asked: str | None) -> None:
    # local references: an unread answer may go on during the next test, after `forget`
    faults, sent, halfway, data = hub.faults, hub.sent, hub.halfway, hub.repos[repo][path].data
    if faults.statuses:
        say(request, faults.statuses.pop(0), {"error": "no"})
        return
    begin, end, status = 0, len(data), 200
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
    if found and not faults.no_ranges:
        begin, end, status = int(found[1]), min(int(found[2] or len(data)) + 1, len(data)), 206
        begin = max(begin - faults.shifted, 0)
    if begin and faults.past_the_end:
        say(request, 416, {"error": "no such range"}, Content_Range=f"bytes */{len(data)}")
        return
    request.send_response(status)
    request.send_header("Content-Length", str(end - begin))
    if status == 206:
        request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
    request.end_headers()
    whole = not (asked and asked.partition("-")[2])  # not the part of a file that is fetched to read its header
    stop = begin + faults.cut.pop(0) if faults.cut and whole else end
    with contextlib.suppress(ConnectionError):
        for at in range(begin, min(stop, end), _BLOCK):
            block = data[at : min(at + _BLOCK, stop, end)]
            request.wfile.write(block)
            with hub.counting:
                sent[path] = sent.get(path, 0) + len(block)
            if faults.hold is not None and whole and at >= (begin + end) // 2:
                halfway.set()
                faults.hold.wait(60)
    if stop < end:
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)
