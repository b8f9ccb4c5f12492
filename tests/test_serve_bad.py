"""Invalid requests to `kvedge serve`: each has a specific error, and disturbs no other request."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from forking import Warm
from PIL import Image
from server import QUESTION, SCENES, SERVE, asks, cached, check_refused, data_url, picture, serving, source_of, then
from test_bad_input import png_header

from pykvedge.errors import ImageError, LibraryError, ModelError, OutOfMemoryError, StateError
from pykvedge.serve import errors

KEY = "0123456789abcdefghij"


@pytest.fixture(scope="module")
def server(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.png").write_bytes(SCENES[0].read_bytes())
    options = ("--ctx", "1024", "--memory", "16MiB", "--max-body", "2MB", "--image-folder", folder)
    with serving(environment, *options) as one:
        one.folder = folder
        yield one
        assert one.text(asks(QUESTION, SCENES[0]))  # still answers after any request
        assert one.metric("requests_running") == 0


def image(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


HELLO = [{"role": "user", "content": "Hello"}]
DEEP = "[" * 100_000
CALLED = [  # its arguments are JSON inside JSON
    *HELLO,
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 80 + "]" * 80}}]},
]
JSON, VALUE, IMAGE = "invalid_json", "invalid_value", "invalid_image"
WRONG = [
    (b"", 400, JSON, None), (b"{", 400, JSON, None), (b"\xff\xfe", 400, JSON, None), (DEEP.encode(), 400, JSON, None),
    (b"[]", 400, VALUE, None), (b"null", 400, VALUE, None),
    ({}, 400, VALUE, "messages"), ({"messages": []}, 400, VALUE, "messages"),
    ({"messages": "Hello"}, 400, VALUE, "messages"), ({"messages": [{}]}, 400, VALUE, "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, VALUE, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, VALUE, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, 400, VALUE, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": ""}]}, 400, VALUE, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, VALUE, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, 400, VALUE, "messages"),
    ({"messages": [*HELLO, *[{"role": "assistant", "content": "x"}] * 2]}, 400, VALUE, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "context_length_exceeded", "messages"),
    ({"messages": HELLO, "x": "word " * 300_000}, 400, "context_length_exceeded", "messages"),
    ({"messages": HELLO, "temperature": -1}, 400, VALUE, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, 400, VALUE, "temperature"),
    ({"messages": HELLO, "temperature": 1e400}, 400, VALUE, "temperature"),
    ({"messages": HELLO, "top_p": 2}, 400, VALUE, "top_p"),
    ({"messages": HELLO, "max_tokens": -2}, 400, VALUE, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 2**40}, 400, VALUE, "max_tokens"),
    ({"messages": HELLO, "n": 100}, 400, VALUE, "n"),
    ({"messages": HELLO, "stop": [""]}, 400, VALUE, None), ({"messages": HELLO, "stop": 5}, 400, VALUE, "stop"),
    ({"messages": HELLO, "logit_bias": {"99999999": 1}}, 400, VALUE, None),
    ({"messages": HELLO, "logit_bias": [1]}, 400, VALUE, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {f"w{i}": 1 for i in range(5000)}}, 400, VALUE, "logit_bias"),
    ({"messages": HELLO, "seed": 2**70}, 400, VALUE, "seed"),
    ({"messages": HELLO, "top_logprobs": 3}, 400, VALUE, "top_logprobs"),
    ({"messages": HELLO, "grammar": "no rule"}, 400, VALUE, "grammar"),
    ({"messages": HELLO, "grammar": "root ::= ("}, 400, VALUE, None),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, VALUE, "response_format"),
    ({"messages": HELLO, "response_format": {"type": "json_object", "schema": {"type": "magic"}}}, 400, VALUE, None),
    ({"messages": HELLO, "tool_choice": "required"}, 400, VALUE, "tool_choice"),
    ({"messages": HELLO, "tools": [{"type": "magic"}]}, 400, VALUE, "tools.0.type"),
    ({"messages": HELLO, "kvedge": {"method": "magic"}}, 400, VALUE, None),
    ({"messages": HELLO, "kvedge": {"budget": -1}}, 400, VALUE, None),
    ({"messages": HELLO, "kvedge": {"unknown": 1}}, 400, VALUE, "kvedge.unknown"),
    ({"messages": HELLO, "kvedge": {"settings": {"budget": 0.2}}}, 400, VALUE, None),
    ({"messages": HELLO, "kvedge": {"settings": {"method": "lookm"}}}, 400, VALUE, None),
    ({"messages": HELLO, "kvedge": {"settings": {"params": 5}}}, 400, VALUE, None),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, VALUE, None),
    ({"messages": HELLO, "chat_template_kwargs": {"a": "word " * 3000}}, 400, "context_length_exceeded", "messages"),
    ({"messages": HELLO, "chat_template_kwargs": {"a": [{}] * 110_000}}, 413, "too_large", None),
    ({"messages": HELLO, "chat_template_kwargs": {"data": "word " * 300_000}}, 413, "too_large", None),
    ({"messages": HELLO, "model": "data:" + "a" * 1_500_000}, 413, "too_large", None),
    ({"messages": CALLED + HELLO}, 400, JSON, None),
    ({"messages": image("data:image/png;base64,%%%")}, 400, IMAGE, "messages"),
    ({"messages": image("data:,hello")}, 400, IMAGE, "messages"),
    ({"messages": image(data_url(b"no picture"))}, 400, IMAGE, "messages"),
    ({"messages": image(data_url(png_header(60000, 60000)))}, 400, IMAGE, "messages"),
    ({"messages": image("http://127.0.0.1/a.png")}, 400, IMAGE, "messages"),
    ({"messages": image("https://127.0.0.1/a.png")}, 400, IMAGE, "messages"),
    ({"messages": image("a.png")}, 400, IMAGE, "messages"),
    ({"messages": image("file:///etc/passwd")}, 403, "forbidden_file", "messages"),
    ({"messages": HELLO, "x": "y" * 3_000_000}, 413, "too_large", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ImageError("why"), 400, IMAGE),
        (ModelError("why"), 400, VALUE),
        (StateError("why"), 503, "unavailable"),
        (OutOfMemoryError("why"), 503, "out_of_memory"),
        (LibraryError("why"), 500, None),
    ],
)
def test_what_fails_is_told_in_its_own_words(error, status, code):
    told = errors.of(error)
    assert (told.status, told.message, told.code) == (status, "why", code)


@pytest.mark.parametrize(
    ("error", "says"), [(MemoryError(), "not enough memory"), (RuntimeError("can't start new thread"), "pids.max")]
)
def test_what_the_system_lacks_may_be_there_later(error, says):
    told = errors.of(error)
    assert (told.status, told.code) == (503, "out_of_memory") and told.retry_s and says in told.message


@pytest.mark.parametrize(("body", "status", "code", "param"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests(server, body, status, code, param):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post("/v1/chat/completions", content=data)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error["message"]
    figures = {"n_prompt_tokens", "n_ctx"} & set(error) if code == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | figures
    assert error["message"] and "\n" not in error["message"]
    assert not error["message"].startswith("unexpected")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/messages", {"messages": HELLO}, 400), ("/v1/messages", {"max_tokens": 5, "messages": [{}]}, 400),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
        ("/v1/responses", {"input": []}, 400), ("/v1/responses", {"input": [{"role": "user"}]}, 400),
        ("/v1/responses", {"input": "x", "previous_response_id": "a"}, 400),
        ("/v1/responses", {"input": [{"type": "magic"}]}, 400),
        ("/v1/kvedge/plan", {"method": 5}, 400), ("/v1/nothing", {}, 404), ("/v1/models", {}, 405),
    ],
)  # fmt: skip
def test_wrong_requests_in_other_forms(server, path, body, status):
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert sorted(answer.headers.get("allow", "").split(", ")) == (["GET", "HEAD"] if status == 405 else [""])


def test_many_pixels_are_too_many_together(server):
    data = io.BytesIO()
    Image.new("1", (9000, 5000)).save(data, "PNG")
    answer = server.chat([{"role": "user", "content": [picture(data.getvalue())] * 3}])
    assert check_refused(answer)["code"] == "too_many_pixels"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_pictures_are_not_in_memory_at_once(server):
    """18 pictures of 4 megapixels, not scaled: 206 MiB of pixels, and as much again for mtmd."""
    files = [io.BytesIO() for _ in range(18)]
    for i, file in enumerate(files):
        Image.new("L", (2000, 2000), i).save(file, "PNG")
    pictures = [file.getvalue() for file in files]

    def work():
        said = [{"role": "user", "content": [source_of(one) for one in pictures]}]
        count = server.client.post("/v1/messages/count_tokens", json={"messages": said})
        assert count.status_code == 200 and count.json()["input_tokens"] > 18 * 144
        parts = [picture(one) for one in pictures]
        refused = server.chat([{"role": "user", "content": parts}])
        check_refused(refused, "exceeds the available context size (1024)")
        assert server.chat([{"role": "user", "content": parts[:6]}], max_tokens=1).status_code == 200

    assert server.most_kib(work) < 200 << 10


def test_a_file_below_the_folder_is_read_and_no_other(server):
    inside = (server.folder / "a.png").as_uri()
    assert server.chat(image(inside)).status_code == 200
    (server.folder / "out.png").symlink_to("/etc/hostname")
    for path in ((server.folder / "out.png").as_uri(), f"{server.folder.as_uri()}/../a.png", "file://host/a.png"):
        assert server.chat(image(path)).status_code == 403


def test_other_names_and_other_pages(server):
    foreign = {"Origin": "https://evil.example"}, {"Origin": "http://localhost:3000", "Content-Type": "text/plain"}
    for headers in ({"Host": "evil.example"}, *foreign):
        answer = server.client.post("/v1/chat/completions", content=json.dumps({"messages": HELLO}), headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert server.client.options("/v1/models", headers=foreign[0]).status_code == 403
    assert server.client.get("/health", headers={"Host": "localhost:1"}).status_code == 200


def test_pages_that_were_invited_may_ask(environment, tmp_path):
    page = "http://localhost:3000"
    (tmp_path / "key").write_text(KEY)
    with serving(environment, "--allow-origin", f"{page}/", "--key-file", tmp_path / "key", "--ctx", "512") as server:
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-other"}
        before = server.client.options("/v1/chat/completions", headers={"Origin": page, **wanted})  # without a key
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == page
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == "authorization, x-other"
        good = {"Authorization": f"Bearer {KEY}", "Origin": page}
        answer = server.client.post("/v1/chat/completions", json={"messages": HELLO}, headers=good)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page
        assert "origin" in answer.headers["vary"].lower()
        refused = server.client.post("/v1/chat/completions", json={"messages": HELLO}, headers={"Origin": page})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page
        for other in ("http://localhost:3001", "https://localhost:3000", "null"):
            assert server.client.options("/v1/models", headers={"Origin": other, **wanted}).status_code == 400
            answer = server.client.get("/v1/models", headers={**good, "Origin": other})
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_what_comes_slowly_or_leaves_is_no_trouble(server):
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    left = [socket.create_connection((host, port)) for _ in range(20)]
    for i, one in enumerate(left):
        one.sendall(head + b"{" * i)
    assert server.text(HELLO) is not None
    for one in left:
        one.close()
    with socket.create_connection((host, port)) as one:
        one.sendall(b"nothing that is HTTP\r\n\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 400")


def test_a_key(environment, tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    with serving(environment, "--key-file", file, "--ctx", "512") as server:
        good = {"Authorization": f"Bearer {KEY}"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"x-api-key": "wrong"}):
            answer = server.client.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert server.client.get("/metrics", headers=headers).status_code == 401
        for headers in (good, {"x-api-key": KEY}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
        assert server.client.get("/health").status_code == 200


# ---------------------------------------------------------------------------------------------------- the process


def test_options_that_cannot_be(kvedge, refused, tmp_path):
    short = tmp_path / "key"
    short.write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        kvedge("serve", "--port", taken.getsockname()[1]).failed(1, "cannot listen", "--port")
    refused("serve", "--host", "0.0.0.0").failed(2, "--key-file")
    refused("serve", "--key-file", short).failed(2, "16")
    refused("serve", "--key-file", tmp_path / "none").failed(2, "cannot be read")
    refused("serve", "--share-prompts").failed(2, "--share-prompts needs --key-file")
    refused("serve", "--memory", "much").failed(2, "--memory")
    refused("serve", "--image-folder", tmp_path / "none").failed(2, "is not a folder")
    refused("serve", "--allow-origin", "localhost:3000").failed(2, "--allow-origin", "https://NAME")
    for number in ("4000000", str(2**70)):
        for command in ("serve", "tune"):
            refused(command, "--parent-pid", number).failed(2, "--parent-pid", "does not exist")
    refused("serve", "--model", tmp_path / "none.gguf").failed(1, "none.gguf")


@pytest.mark.parametrize("missing", ["httptools", "httpcore", "prometheus_client", "uvloop"])
def test_what_is_missing_of_the_extra_is_named(kvedge, tmp_path, missing):
    if missing == "uvloop" and sys.platform == "win32":
        pytest.skip("it is for other systems")
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.modules['{missing}'] = None; from pykvedge.__main__ import main; main()")
    done = kvedge("serve", script=program, timeout=60)
    assert done.code == 2 and done.out == ""
    assert done.err == f"kvedge: error: kvedge serve needs {missing}: pip install 'kvedge[serve]'\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_in_the_middle_of_an_answer(environment):
    with serving(environment, "--ctx", "16384", "--grace", "1") as server:
        with server.endless(HELLO, max_tokens=16000) as lines:
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line]
            assert "the server is shutting down" in last[-2] and last[-1] == "data: [DONE]"
        _, err = server.process.communicate(timeout=60)
        assert server.process.returncode == 0 and "Traceback" not in err, err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_it_ends_with_its_parent_or_its_pipe(environment):
    command = [sys.executable, "-m", "pykvedge", *SERVE, "--ctx", "512", "--parent-pid", str(os.getpid())]
    pipes = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Warm(command, stdin=subprocess.PIPE, **pipes)
    told = json.loads(process.stdout.readline())
    assert httpx.get(f"{told['url']}/health").json()["status"] == "ok"
    process.stdin.close()
    assert process.wait(60) == 0
    parent = subprocess.Popen(["sleep", "60"])
    with Warm([*command[:-1], str(parent.pid)], stdin=subprocess.DEVNULL, **pipes) as process:
        assert json.loads(process.stdout.readline())["url"]
        parent.kill()
        parent.wait()
        assert process.wait(60) == 0


def test_a_folder_that_cannot_keep_conversations_is_said(kvedge, environment, tmp_path):
    """Without this message, conversations would be lost silently."""
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", *([Path("/proc")] if sys.platform == "linux" else [])):
        kvedge("serve", "--port", 0, "--park", folder).failed(1, f"--park {folder} cannot be used")
    with serving(environment, "--park", tmp_path / "park", "--ctx", "1024") as server:
        assert server.text(asks(QUESTION, SCENES[0]))
        (tmp_path / "park").rmdir()
        code, _, said = server.end()
        assert code == 0 and "an entry was not saved, because its file was removed" in said


def test_a_folder_that_is_damaged_or_full_costs_time_only(environment, tmp_path):
    park = tmp_path / "park"
    with serving(environment, "--park", park, "--ctx", "1024", "--memory", "3MiB") as server:
        said = asks(QUESTION, SCENES[0])
        said = then(said, server.text(said), "And then?")
        assert server.end()[0] == 0
    entries = list(park.iterdir())
    assert entries and all(entry.stat().st_mode & 0o77 == 0 for entry in entries) and park.stat().st_mode & 0o77 == 0
    with serving(environment, "--park", park, "--ctx", "1024") as server:
        assert cached(server.chat(said).json()) > 0  # from the previous run
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-10])
    with serving(environment, "--park", park, "--ctx", "1024") as server:
        assert cached(server.chat(said).json()) == 0
