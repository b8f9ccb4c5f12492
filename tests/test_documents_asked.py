"""Questions about PDFs of drawn scenes are answered right: in Python, at the terminal, in streams and over HTTP."""

import asyncio
import base64
import http.client
import json
from contextlib import suppress
from types import SimpleNamespace

import httpx
import psutil
import pytest
from pdfs import of_pictures
from server import DEMO, SCENES, picture
from test_documents import BOMBS
from waits import until

import pykvedge
from pykvedge.cli.progress import Display
from pykvedge.cli.talk import commands
from pykvedge.cli.talk.chat import Chat, Style
from pykvedge.serve.asking import Defaults
from pykvedge.serve.pictures import Sources
from pykvedge.serve.service import MAX_DOCUMENTS, Service, parsed_requests
from pykvedge.serve.wire import ChatRequest, parsed

CODES = ["64UM3", "4LPY5", "2L4T", "EEAUF4"]  # examples/scenes.md
SERVED = ("--ctx", "2048", "--method", "full")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return of_pictures(tmp_path_factory.mktemp("pdf") / "scenes.pdf", *SCENES)


def demo(**settings):
    plan = pykvedge.plan("streaming-llm", 2000) if "stream" in settings else pykvedge.plan("full")
    return pykvedge.Session(DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf", plan, threads=1, **settings)


def asked(session, prompt, images=()):
    return session.ask(prompt, images).read().strip()


def question(i: int, word: str = "page") -> str:
    return f"What is the code in {word} {i}?"


def test_sessions_know_pages_by_their_numbers(native, scenes, tmp_path):
    with demo(undo=True) as session:
        assert asked(session, question(2), scenes) == CODES[1]
        assert asked(session, question(4)) == CODES[3]  # answered from the pages in the cache
        assert session.undo().text == question(4)
        assert asked(session, question(3, "image")) == session.retry().read().strip() == CODES[2]
        session.save(tmp_path / "talk.kvs")
        told = [(p.name, p.page, p.document) for p in session.messages[0].pictures]
        assert [page for _, page, _ in told] == [1, 2, 3, 4]
        session.clear()
        session.load(tmp_path / "talk.kvs")
        assert [(p.name, p.page, p.document) for p in session.messages[0].pictures] == told
        assert asked(session, question(1)) == CODES[0]
        # pages of the same document in a later message, after loading the session file
        later = pykvedge.Message("user", "?", list(pykvedge.pages(scenes, "3")))
        assert later.content("<m>", session.messages[0].pictures) == "Page 3: <m>\n?"


def test_pages_that_were_read_once_are_not_read_again(native, scenes, tmp_path):
    for word, i in (("page", 2), ("image", 3)):
        with demo(cache=tmp_path, question_blind=True) as session:
            answer = session.ask(question(i, word), scenes)
            assert answer.read().strip() == CODES[i - 1]
            assert (answer.report.tokens.reused > 4 * 144) == (i == 3)


def test_streams_read_pages_one_by_one(native, scenes):
    with demo(stream=True) as session:
        answer = session.ask(question(3, "image"), [f"{scenes}[1-2]", f"{scenes}[3-]"])
        assert answer.read().strip() == CODES[2]
        assert [(p.page, p.rgb) for p in session.messages[0].pictures] == [(i, b"") for i in (1, 2, 3, 4)]


def test_conversations_at_a_terminal(native, scenes, kvedge, capfd):
    with demo(undo=True) as session:
        chat = Chat(session, pykvedge.Sampling(), Style(quiet=True), Display(enabled=False))
        commands.run(chat, f"/image '{scenes}[2-3]'")
        assert "images 1 to 2: 2 pages of scenes.pdf, sent with the next message" in capfd.readouterr().err
        chat.answer(question(1, "image"))
        assert capfd.readouterr().out.strip() == CODES[1]
    told = kvedge("chat", "--image", scenes, "--method", "full", question(4))
    assert told.out.strip() == CODES[3]
    for pages, says in (
        ("[5]", "but page 5 was requested"),
        ("[]", "not name a page"),
        ("[a]", "pages must be numbers"),
    ):
        kvedge("chat", "--image", f"{scenes}{pages}", "x").failed(2, says)
    fits = kvedge("fit", "--image", scenes, "--image", SCENES[0], "--json").json
    assert (fits["images"], fits["image_tokens"]) == (5, 144)


# ------------------------------------------------------------------------------------------------------------


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def forms(data: bytes, name: str, text: str):
    """Returns (path, body) of the same question about a PDF in each of the three wire formats."""
    url, say = f"data:application/pdf;base64,{encoded(data)}", {"type": "text", "text": text}
    file, source = {"filename": name, "file_data": url}, {"type": "base64", "media_type": "application/pdf"}
    said = {
        "chat/completions": [{"type": "file", "file": file}, say],
        "responses": [{"type": "input_file", **file}, {"type": "input_text", "text": text}],
        "messages": [{"type": "document", "title": name, "source": {**source, "data": encoded(data)}}, say],
    }
    out = []
    for path, parts in said.items():
        turns = {"input" if path == "responses" else "messages": [{"role": "user", "content": parts}]}
        out.append((f"/v1/{path}", {"temperature": 0, "max_tokens": 24, **turns}))
    return out


def answered(answer):
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if "choices" in told:
        return told["choices"][0]["message"]["content"].strip()
    return (told["output"][0]["content"] if "output" in told else told["content"])[0]["text"].strip()


def test_documents_over_http(server, scenes):
    data = scenes.read_bytes() + b"%" + b"x" * 70_000  # larger than what is kept in JSON
    for path, body in forms(data, "scenes.pdf", question(2)):
        assert answered(server.client.post(path, json=body)) == CODES[1]
    chat, body = forms(data, "scenes.pdf", question(2))[0]
    said = [{"role": "assistant", "content": CODES[1]}, {"role": "user", "content": question(3, "image")}]
    later = server.client.post(chat, json={**body, "messages": [*body["messages"], *said]})
    assert answered(later) == CODES[2]
    assert later.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 4 * 144  # no page was read again
    for path, body in forms(data, "scenes.pdf[4]", "What is the code?"):
        assert answered(server.client.post(path, json=body)) == CODES[3]
    for path, body in forms(data, "scenes.pdf[2,9]", "x"):
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400 and "scenes.pdf has 4 pages, but page 9 was requested" in answer.text
    for path, body in forms(b"nothing", "", "x"):
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400 and "cannot be read as a PDF" in answer.text


def test_few_requests_wait_for_pages():
    defaults = Defaults(pykvedge.plan("full"), pykvedge.Sampling(), Sources())
    busy = Service(None, defaults, "m", "f", documents=MAX_DOCUMENTS)
    chat = parsed(ChatRequest, json.dumps(forms(b"%PDF-", "a.pdf", "x")[0][1]).encode())
    with pytest.raises(pykvedge.RequestError, match="too many requests wait for PDF pages") as refused:
        asyncio.run(parsed_requests(busy, SimpleNamespace(scope={}), chat))
    assert refused.value.status == 503 and busy.documents == MAX_DOCUMENTS


def test_a_hostile_document_holds_nobody_up(server):
    bomb, fine = forms(BOMBS["drawings in drawings"], "bomb.pdf", "x")[0], SCENES[0]

    def drawn() -> int:
        found = 0
        for child in psutil.Process(server.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # the process has ended
                found += "pdf_worker" in " ".join(child.cmdline())
        return found

    waiting = http.client.HTTPConnection("127.0.0.1", httpx.URL(server.url).port)
    waiting.request("POST", bomb[0], json.dumps(bomb[1]), {"Content-Type": "application/json"})
    until(drawn)
    said = [{"role": "user", "content": [picture(fine), {"type": "text", "text": "What is the code?"}]}]
    assert server.text(said) == CODES[0] and drawn()  # the other document is still being drawn
    waiting.close()
    until(lambda: not drawn())  # nobody waits for the drawing any more
