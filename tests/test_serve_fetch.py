"""Pictures from URLs: public addresses, hostile hosts, and a server without --allow-https-images, which fetches
nothing.
"""

import asyncio
import base64
import os
import signal
import socket
import ssl
import sys
import threading
import time
from urllib.parse import quote

import httpx
import pytest
import trustme
from server import SCENES, SERVE, asks, check_refused, data_url, serving
from waits import until

import pykvedge
from pykvedge.errors import ImageError, RequestError
from pykvedge.serve import fetching, pictures
from pykvedge.serve.pictures import Sources

PICTURE = SCENES[0].read_bytes()

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
OWN = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "64:ff9b:1::808:808",
    "2002:7f00:1::1", "2002:a9fe:a9fe::1", "2002:c0a8:101::", "2001::1", "2001:0:808:808::1", "2001:db8::1", "100::1",
    "localhost", "", "8.8.8", "1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet(address):
    assert fetching.is_public(address)


def test_addresses_that_nobody_fetches_from():
    assert not [address for address in OWN if fetching.is_public(address)]


# -------------------------------------------------------------------------------------------- name lookups


def resolver(monkeypatch, table):
    """Answers name lookups with the addresses in a table, one list after the other. Returns the list of lookups."""
    asked = []

    def looked_up(host, port, **_):
        asked.append(host)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        answers = table[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", looked_up)
    return asked


@pytest.mark.parametrize("found", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], []])
def test_a_name_that_stands_for_this_network_is_refused(monkeypatch, found):
    resolver(monkeypatch, {"a.example": [found]})
    with pytest.raises(ImageError, match=r"a\.example, is not a public host"):
        asyncio.run(fetching.public_addresses("a.example", 443))
    with pytest.raises(ImageError, match="is unknown"):
        asyncio.run(fetching.public_addresses("b.example", 443))


@pytest.mark.parametrize(
    "url",
    ["http://a.example/", "ftp://a.example/", "https://", "https://user@a.example/", "https://a.example:99999/",
     "https:///a", "https://[::1/", "https://a.example:x/", "data:,", ""],
)  # fmt: skip
def test_urls_that_are_none(url):
    with pytest.raises(ImageError, match="https://HOST/PATH"):
        fetching._checked(url)


def test_what_a_url_may_hold_is_written_out():
    assert fetching._checked("https://bücher.example/a b?c=d\u00e9&e=%20#f") == (
        "https://xn--bcher-kva.example/a%20b?c=d%C3%A9&e=%20"
    )
    assert fetching._checked("https://[2606:4700::1]:8443") == "https://[2606:4700::1]:8443/"


# ------------------------------------------------------------------------------------------------- a host over TLS


class Host:
    """A local TLS server. said(connection, path) answers each request."""

    def __init__(self, said, names=("a.example", "b.example")):
        self.authority, self.said, self.paths, self.connections = trustme.CA(), said, [], 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(*names).configure_cert(self._context)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                one = self._listening.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one):
        try:
            with self._context.wrap_socket(one, server_side=True) as connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    part = connection.recv(4096)
                    if not part:
                        return
                    data += part
                self.paths.append(data.split()[1].decode())
                self.said(connection, self.paths[-1])
        except OSError:
            return

    def close(self):
        self._listening.close()


def answer(connection, body, status="200 OK", more=""):
    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body)


def drip(connection, _=None):
    """Sends a byte now and then, without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


@pytest.fixture
def host(closing, monkeypatch):
    """Returns a host with public addresses, whose connections come to this machine."""

    def make(said, table=None):
        one = closing(Host(said))
        one.asked = resolver(monkeypatch, table or {"a.example": [["8.8.8.8"]], "b.example": [["8.8.4.4"]]})
        context = ssl.create_default_context()
        one.authority.configure_trust(context)
        monkeypatch.setattr(fetching, "_context", lambda: context)
        one.reached = []
        plain = fetching.httpcore.AnyIOBackend.connect_tcp

        async def connect(self, address, port, *arguments, **more):
            one.reached.append(address)
            return await plain(self, "127.0.0.1", one.port, *arguments, **more)

        monkeypatch.setattr(fetching.httpcore.AnyIOBackend, "connect_tcp", connect)
        return one

    return make


def fetched(*urls):
    return asyncio.run(fetching.Fetching().all(urls))


def test_a_picture_is_fetched_from_the_address_that_was_looked_at(host):
    """The name has another address at the second lookup: a second lookup would connect to this machine."""
    one = host(lambda c, _: answer(c, PICTURE), {"a.example": [["8.8.8.8"], ["127.0.0.1"]]})
    url = "https://a.example/a.png?b=c"
    assert fetched(url) == {url: PICTURE}
    assert one.asked == ["a.example"] and one.reached == ["8.8.8.8"] and one.paths == ["/a.png?b=c"]


def test_a_certificate_of_another_name_is_refused(host):
    one = host(lambda c, _: answer(c, PICTURE), {"c.example": [["8.8.8.8"]]})
    with pytest.raises(ImageError, match="cannot be downloaded"):
        fetched("https://c.example/a.png")
    assert one.paths == []


def test_redirects_are_looked_at_and_counted(host):
    ways = {"/1": "https://b.example/2", "/2": "/a.png", "/http": "http://b.example/a.png", "/round": "/round",
            "/in": "https://own.example/", "/file": "file:///etc/passwd", "/literal": "https://127.0.0.1/"}  # fmt: skip

    def said(connection, path):
        if path == "/a.png":
            answer(connection, PICTURE)
        else:
            answer(connection, b"", "302 Found", f"Location: {ways[path]}\r\n")

    table = {"a.example": [["8.8.8.8"]], "b.example": [["8.8.4.4"]], "own.example": [["10.0.0.1"]],
             "127.0.0.1": [["127.0.0.1"]]}  # fmt: skip
    one = host(said, table)
    assert list(fetched("https://a.example/1").values()) == [PICTURE]
    assert one.reached == ["8.8.8.8", "8.8.4.4", "8.8.4.4"]
    for path, why in (("http", "HOST/PATH"), ("file", "HOST/PATH"), ("in", "own.example, is not a public host"),
                      ("literal", "is not a public host"), ("round", "redirects more than")):  # fmt: skip
        with pytest.raises(ImageError, match=why):
            fetched(f"https://a.example/{path}")
    assert set(one.reached) == {"8.8.8.8", "8.8.4.4"}
    before = len(one.paths)
    with pytest.raises(ImageError, match="redirects more than"):
        fetched("https://a.example/round")
    assert len(one.paths) - before == 4


@pytest.mark.parametrize("told", [True, False])
def test_size_is_bounded_whatever_the_host_says(host, monkeypatch, told):
    monkeypatch.setattr(fetching, "MAX_BYTES", 1 << 20)
    sent = []

    def said(connection, path):
        length = f"Content-Length: {1 << 30}\r\n" if told else ""
        connection.sendall(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode())
        while True:
            connection.sendall(bytes(1 << 16))
            sent.append(1 << 16)

    host(said)
    with pytest.raises(ImageError, match="MiB"):
        fetched("https://a.example/a.png")
    assert sum(sent) < 64 << 20


def test_pictures_of_a_request_are_bounded_together(host, monkeypatch):
    monkeypatch.setattr(fetching, "_REQUEST_BYTES", 3 * len(PICTURE))
    one = host(lambda c, _: answer(c, PICTURE))
    urls = [f"https://a.example/{i}" for i in range(3)]
    assert fetched(*urls, urls[0]) == dict.fromkeys(urls, PICTURE) and len(one.paths) == 3
    with pytest.raises(ImageError, match="all pictures of a request at most"):
        fetched(*urls, "https://a.example/3")


@pytest.mark.parametrize("status", ["404 Not Found", "500 No", "204 No Content"])
def test_a_status_that_is_no_picture(host, status):
    host(lambda c, _: answer(c, b"", status))
    with pytest.raises(ImageError, match=f"status {status[:3]}"):
        fetched("https://a.example/a.png")


def silent(connection, _):
    connection.recv(1)


@pytest.mark.parametrize("said", [drip, silent])
def test_time_is_bounded_in_all(host, monkeypatch, said):
    monkeypatch.setattr(fetching, "_SECONDS", 0.5)
    host(said)
    with pytest.raises(ImageError, match="takes longer"):
        fetched("https://a.example/a.png", "https://b.example/b.png")


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(fetching, "_SECONDS", 0.2)
    over = threading.Event()
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])
    with pytest.raises(ImageError, match="takes longer"):
        fetched("https://a.example/a.png")
    over.set()


def test_requests_that_fetch_are_so_many_at_a_time(host, monkeypatch):
    monkeypatch.setattr(fetching, "_REQUESTS", 2)
    monkeypatch.setattr(fetching, "_SECONDS", 0.5)
    host(drip)

    async def three():
        one = fetching.Fetching()
        return await asyncio.gather(*[one.all(["https://a.example/a"]) for _ in range(3)], return_exceptions=True)

    found = asyncio.run(three())
    assert [type(error) for error in found] == [ImageError, ImageError, RequestError] and found[2].status == 503


# ------------------------------------------------------------------------------------ data: and file:, without a host


def test_pictures_in_data_urls():
    rgb = pykvedge.load_picture(SCENES[0]).rgb
    sources = Sources()
    text = data_url(PICTURE)
    escaped = text[:22] + text[22:].replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    others = [head + text[22:] for head in ("data:;base64,", "data:image/x;a=b;base64,")]
    lines = text[:22] + base64.encodebytes(PICTURE).decode().replace("\n", "\r\n")  # as in a mail
    quoted = text[:22] + quote(lines[22:])
    for url in (text, "DATA" + text[4:], escaped, lines, quoted, *others):
        assert sources.load(url, "a").rgb == rgb and sources.knows(url)
        assert not Sources(owner="bob", _known=sources._known).knows(url)  # not for another owner, with the same memory
    wrong = ["data:text/html;base64," + text[22:], text.replace(";base64", ""), text[:-5] + "%41" + text[-5:]]
    for url in (*wrong, text[:-1], text[:-5] + "\u00a0" + text[-5:]):
        with pytest.raises(ImageError, match="data: URL"):
            sources.load(url, "a")


def test_the_file_of_a_picture_is_bounded(monkeypatch, tmp_path):
    """The limit applies to data: URLs and to files in a folder; one byte more is too many."""
    file = tmp_path / "a.png"
    for more in (0, 1):
        data = PICTURE + bytes(300 + more - len(PICTURE) % 300)
        monkeypatch.setattr(pictures, "MAX_BYTES", len(data) - more)
        file.write_bytes(data)
        for url in (data_url(data + bytes(3 * more)), file.as_uri()):
            if more:
                with pytest.raises(ImageError, match="may have"):
                    Sources(files=tmp_path).load(url, "a")
            else:
                assert Sources(files=tmp_path).load(url, "a").width


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")
def test_files_that_are_read_and_others(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside, inside / "deep"):
        folder.mkdir()
        (folder / "a.png").write_bytes(PICTURE)
    (inside / "link.png").symlink_to(inside / "a.png")
    (inside / "out.png").symlink_to(outside / "a.png")
    os.mkfifo(inside / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(inside / "socket"))
    sources, uri = Sources(files=inside), inside.as_uri()
    local = uri.replace("file://", "file://localhost")
    for name in ("a.png", "deep/a.png", "link.png", "deep/../a.png", "%61.png"):
        assert sources.load(f"{uri}/{name}", "a").width and sources.load(f"{local}/{name}", "a").width
    host = uri.replace("file://", "file://host")
    for url in (f"{uri}/out.png", f"{uri}/../out/a.png", f"{host}/a.png", "file:///etc/passwd", f"{uri}/%00", "file://[a/"):
        with pytest.raises(RequestError) as found:
            sources.load(url, "a")
        assert (found.value.status, found.value.code) == (403, "forbidden_file")
    for name, why in (("pipe", "is not a regular file"), ("", "is not a regular file"),
                      ("deep", "is not a regular file"), ("socket", "cannot be read"),
                      ("none.png", "cannot be read")):  # fmt: skip
        with pytest.raises(ImageError, match=why):
            sources.load(f"{uri}/{name}", "a")
    with pytest.raises(RequestError, match=r"accepts pictures only as data: URLs$"):
        Sources().load(f"{uri}/a.png", "a")
    with pytest.raises(RequestError, match=r"accepts pictures only as data: URLs and https: URLs and file: URLs$"):
        Sources(https=True, files=inside).load("http://a.example/", "a")


# ----------------------------------------------------------------------------------------------- the default server


def picture(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_nothing_is_fetched_where_nobody_said_so(environment):
    with socket.create_server(("127.0.0.1", 0)) as listening, serving(environment, "--ctx", "512") as server:
        port = listening.getsockname()[1]
        for scheme in ("https", "http", "HTTPS", "ftp"):
            refused = server.chat(picture(f"{scheme}://127.0.0.1:{port}/a.png"))
            error = check_refused(refused)
            assert error["code"] == "invalid_image"
            assert error["message"] == "picture 1: this server accepts pictures only as data: URLs"
        listening.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listening.accept()


WORKER = """
import socket, sys
from pykvedge.serve import fetching
real = socket.getaddrinfo
fetching.is_public = lambda address: True  # this machine, for once
fetching._SECONDS = 120.0
fetching._context.cache_clear()
from pykvedge.__main__ import main
sys.argv[0] = "kvedge"
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes")
def test_a_host_that_drips_and_a_pipe_hold_nobody_and_no_end(environment, tmp_path):
    one = Host(drip, ("localhost",))
    one.authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    os.mkfifo(pictures / "pipe.png")
    (pictures / "a.png").write_bytes(PICTURE)
    known = {**environment, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    options = ("--allow-https-images", "--image-folder", pictures, "--ctx", "1024", "--grace", "1")
    with serving(known, *options, program=("-c", WORKER, *SERVE)) as server:
        ended = []

        def ask():
            try:
                said = httpx.post(f"{server.url}/v1/chat/completions", timeout=60,
                                  json={"messages": picture(f"https://localhost:{one.port}/a.png")})  # fmt: skip
                ended.append(said.status_code)
            except httpx.HTTPError:
                ended.append(0)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: len(one.paths) == 8)  # all of them hang
        refused = server.chat(picture((pictures / "pipe.png").as_uri()))
        assert check_refused(refused, "is not a regular file")["code"] == "invalid_image"
        assert server.chat(picture((pictures / "a.png").as_uri())).status_code == 200
        assert server.text(asks("How many shapes are there?", SCENES[1]))
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as leaves:
            body = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://localhost:%d/b"}}]}]}'
            body %= one.port
            leaves.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))  # fmt: skip
            until(lambda: len(one.paths) == 9)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0  # and before the end of the fetch
        for thread in threads:
            thread.join(60)
        assert ended == [503] * 8
    one.close()
