"""The checks before every route of `kvedge serve`, called directly: headers, bodies, origins, counts."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from server import SCENES, asks, picture, serving

import pykvedge
from pykvedge.errors import RequestError, UsageError
from pykvedge.serve import guarding
from pykvedge.serve.bodies import Bounds
from pykvedge.serve.guarding import OWNER, PICTURES, Guarding, Key, Rules
from pykvedge.serve.server import Options, check

HOSTS = frozenset({"localhost", "127.0.0.1", "chat.example"})


def asked(rules, headers=(), parts=(b"{}",), path="/v1/chat/completions", method="POST", app=None):
    """Sends a request in parts through a Guarding. Returns status, headers, body, and what the route received."""
    left, sent, seen = list(parts), [], {}

    async def route(scope, receive, send):
        message = await receive()
        seen.update(body=message["body"], more=message["more_body"], scope=scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"good"})

    async def receive():
        return {"type": "http.request", "body": left.pop(0) if left else b"", "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": [(n.encode(), v.encode()) for n, v in headers]}
    asyncio.run((app or Guarding(route, rules))(scope, receive, send))
    body = b"".join(one.get("body", b"") for one in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body, seen


def code(answer):
    return answer[0], json.loads(answer[2])["error"]["code"]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_every_answer_has_the_headers_that_keep_others_out(key):
    rules = Rules(keys=(Key("right", "o"),))
    good = asked(rules, [("x-api-key", "right")])
    bad = asked(rules, [("x-api-key", key)])
    assert (good[0], bad[0]) == (200, 401)
    for _, headers, _, _ in (good, bad):
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert headers[b"referrer-policy"] == b"no-referrer"
        assert headers[b"cross-origin-resource-policy"] == b"same-origin"
    assert good[1][b"content-type"] == b"text/plain" and good[3]["scope"][OWNER] == "o"
    assert bad[1][b"www-authenticate"] == b"Bearer" and not bad[3]


@pytest.mark.parametrize(("n", "status"), [(1, 200), (4, 200), (5, 413), (1000, 413)])
def test_bodies_in_chunks_are_bounded_like_those_with_a_length(n, status):
    """4 KiB are accepted, with and without a length. A larger body is not kept."""
    parts = [b" " * 1023 + b"1"] * (n - 1) + [b" " * 1024]
    answer = asked(Rules(body=4096, bounds=Bounds(text=1 << 20)), parts=parts)
    assert answer[0] == status
    if status == 200:
        assert answer[3]["body"] == b"".join(parts) and answer[3]["more"] is False
    else:
        assert code(answer) == (413, "too_large") and not answer[3]
    told = asked(Rules(body=4096), [("content-length", str(1024 * n))], parts)
    assert told[0] == status


def test_large_bodies_that_arrive_together_are_bounded(monkeypatch):
    monkeypatch.setattr(guarding, "_SMALL", 10)
    rules = Rules(body=100)

    async def waits(scope, receive, send):
        await receive()
        await asyncio.sleep(scope["delay"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = Guarding(waits, rules)

    async def one(size, delay=0.0):
        statuses = []

        async def receive():
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        async def send(message):
            statuses.append(message.get("status"))

        scope = {"type": "http", "path": "/", "method": "POST", "headers": [], "delay": delay}
        await app(scope, receive, send)
        return statuses[0]

    async def run():
        first = [asyncio.create_task(one(100, 0.5)) for _ in range(4)]
        await asyncio.sleep(0.1)
        more, small = await one(100), await one(10)
        return more, small, await asyncio.gather(*first), await one(100)

    assert asyncio.run(run()) == (503, 200, [200] * 4, 200)
    assert app._held == 0


def test_a_body_that_comes_too_slowly_is_given_up():
    async def never():
        await asyncio.sleep(60)

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/", "method": "POST", "headers": []}
    asyncio.run(Guarding(None, Rules(body_s=0.1))(scope, never, send))
    assert sent[0]["status"] == 408


# ----------------------------------------------------------------------------------------------------------- origins


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("", "localhost:8137", 200), ("http://localhost:8137", "localhost:8137", 200),
        ("http://127.0.0.1:8137", "127.0.0.1:8137", 200), ("HTTP://LOCALHOST:8137", "LocalHost:8137", 200),
        ("http://localhost:3000", "localhost:8137", 403), ("http://localhost", "localhost:8137", 403),
        ("http://127.0.0.1:8137", "localhost:8137", 403), ("https://evil.example", "localhost:8137", 403),
        ("https://chat.example", "127.0.0.1:8137", 200),  # a proxy with a name of the server
        ("https://chat.example:3000", "127.0.0.1:8137", 403), ("null", "localhost:8137", 403),
        ("http://localhost:8137.evil.example", "localhost:8137", 403), ("file://", "localhost:8137", 403),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(origin, host, status):
    headers = [("host", host), ("content-type", "text/plain"), *([("origin", origin)] if origin else [])]
    answer = asked(Rules(HOSTS), headers)
    assert answer[0] == status
    assert status == 200 or code(answer) == (403, "forbidden_origin")
    allowed = asked(Rules(HOSTS, origins=("http://localhost:3000",)), headers)
    assert allowed[0] == (200 if origin == "http://localhost:3000" else status)
    assert asked(Rules(HOSTS, origins=("*",)), headers)[0] == 200
    here = origin in ("http://localhost:3000", "http://localhost", "http://127.0.0.1:8137")
    assert asked(Rules(HOSTS, origins=("localhost",)), headers)[0] == (200 if here else status)


@pytest.mark.parametrize(
    ("origin", "good"),
    [("*", True), ("null", True), ("localhost", True),
     ("https://a.example", True), ("app://obsidian.md", True), ("http://[::1]:3000", True),
     ("localhost:3000", False), ("http://a b", False), ("http://a.example/path", False), ("https://*.example", False),
     ("", False), ("https://a.example,https://b.example", False)],
)  # fmt: skip
def test_origins_that_can_be_allowed(origin, good):
    if good:
        check(Options(origins=(origin,)), pykvedge.plan("full"))
    else:
        with pytest.raises(UsageError, match="--allow-origin"):
            check(Options(origins=(origin,)), pykvedge.plan("full"))


def test_a_request_has_one_host():
    twice = [("host", "localhost"), ("host", "localhost")]
    assert code(asked(Rules(HOSTS), twice)) == (400, "invalid_host")
    assert code(asked(Rules(), twice)) == (400, "invalid_host")
    assert code(asked(Rules(HOSTS), [("host", "evil.example")])) == (403, "forbidden_host")
    assert code(asked(Rules(HOSTS), [])) == (403, "forbidden_host")


# ------------------------------------------------------------------------------------------------------------ counts


def refused(body, bounds):
    with pytest.raises(RequestError) as found:
        bounds.check(body)
    return found.value.status, found.value.code


def test_what_a_body_may_consist_of_is_counted_exactly():
    values = Bounds(text=1 << 20, values=10)
    assert values.check(b"[1,2,3,4,5,6,7,8,9,10]") == 0
    assert refused(b"[1,2,3,4,5,6,7,8,9,10,11]", values) == (413, "too_large")
    assert values.check(b'["a,b{c[d,,,,,,,,,,,,,,"]') == 0  # inside a string, they are text
    assert values.check(rb'["a\",,,,,,,,,,,,,\\", "\\"]') == 0
    depth = Bounds(depth=3)
    assert depth.check(b'[{"a":[]},[[]]]') == 0
    assert refused(b"[[[[]]]]", depth) == (400, "invalid_json")
    text = Bounds(text=100)
    assert text.check(b'"' + b"a" * 98 + b'"') == 0
    assert refused(b'"' + b"a" * 99 + b'"', text) == (400, "context_length_exceeded")
    assert refused(b" " * 101, text) == (400, "context_length_exceeded")
    for open_ended in (b'"' + b"a" * 200, b'"' + b'\\"' * 100, b'"' + b"\\" * 201, b'"data:' + b'\\"' * 100):
        assert refused(open_ended, text) == (400, "context_length_exceeded")


@pytest.mark.parametrize("body", [b'{"url": "data:%s"}', b'{"data" : "%s"}', b'{"type":"base64","data":"%s","x":1}'])
def test_pictures_are_no_text(body):
    picture = b"A" * 100_000
    bounds = Bounds(text=100)
    assert abs(bounds.check(body % picture) - 100_000) < 20
    assert refused((body % picture)[:-1] + b',"x":"' + b"a" * 100 + b'"}', bounds)[1] == "context_length_exceeded"
    assert refused(body.replace(b"data", b"text") % picture, bounds)[1] == "context_length_exceeded"
    assert refused(body % (b"A" * (33 << 20)), bounds) == (413, "too_large")


def test_the_count_stands_before_the_routes():
    answer = asked(Rules(bounds=Bounds(values=3)), parts=[b"[1,2,", b"3,4,5]"])
    assert code(answer) == (413, "too_large") and not answer[3]
    assert asked(Rules(), parts=[b'{"data":"AAAA"}'])[3]["scope"][PICTURES] == 6


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is looked up as Linux tells it")
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_largest_picture_takes_less_than_300_mib(environment, kind):
    """Measured with /proc. The answer equals that of a smaller copy."""
    scene = Image.open(SCENES[0]).convert("RGB")
    file = io.BytesIO()
    scene.resize((7000, 7000), Image.Resampling.NEAREST).save(file, kind, quality=95, compress_level=1)
    content = [picture(file.getvalue()), {"type": "text", "text": "What is the code?"}]
    with serving(environment, "--memory", "32MiB") as server:
        small = server.text(asks("What is the code?", SCENES[0]))
        found = []
        assert server.most_kib(lambda: found.append(server.text([{"role": "user", "content": content}]))) < 300 << 10
        assert found == [small]
