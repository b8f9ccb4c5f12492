"""`kvedge serve --keep`: a conversation goes on with its whole rows, as in a session with keep."""

import pytest
from attached import held
from scheduled_job import ScheduledJob
from server import DEMO, SCENES, asks, serving, then
from waits import until

import pykvedge
from pykvedge import Keep, Message, Sampling
from pykvedge.caches.folder import CacheFolder
from pykvedge.serve.job import Request
from pykvedge.serve.parked import Park

QUESTIONS = ["How many shapes are there?", "What color is the circle?", "And the square?", "What is the code?"]
GREEDY = Sampling(max_tokens=12, temp=0.0)
FILES = (DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf")


@pytest.fixture
def engine(scheduled):
    usual = {"n_ctx": 2048, "memory": 256 << 20}
    return lambda keep, park=None, **limits: scheduled(park, keep=keep, **{**usual, **limits})


def asked(engine, plan, said, seen=None):
    """Returns the report of an answer. seen: collects the held tokens of each compression."""
    decoder, compress = engine._decoder, type(engine._decoder)._compress

    def noting(slot):
        compress(decoder, slot)
        if seen is not None:
            seen.append(held(decoder._driver.cache, slot.sequence.number))

    decoder._compress = noting

    messages = [Message("user", f"<image>\n{said[0]}", [pykvedge.load_picture(SCENES[0])])]
    messages += [Message("user" if i % 2 else "assistant", text) for i, text in enumerate(said[1:])]
    return ScheduledJob(engine, Request(messages, plan, GREEDY)).report


def chain(engine, plan):
    """Returns the reports of four questions, each with all earlier messages, and the held tokens of each."""
    said, reports, kept = [], [], []
    for question in QUESTIONS:
        said.append(question)
        reports.append(asked(engine, plan, said, kept))
        said.append(reports[-1].text)
    return reports, kept


def of_session(plan, **settings):
    texts, kept = [], []
    with pykvedge.Session(*FILES, plan, threads=1, **settings) as session:
        for i, question in enumerate(QUESTIONS):
            answer = session.ask(question if i else f"<image>\n{question}", SCENES[:1] if i == 0 else [], GREEDY)
            kept.append(held(session.engine.cache))
            texts.append(answer.read())
    return texts, kept


@pytest.mark.parametrize("method", ["snapkv", "lookm", "expected"])
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_four_questions_are_answered_as_in_a_session(engine, tmp_path, method, place):
    plan = pykvedge.plan(method, 0.2)
    folder = str(tmp_path) if place == "disk" else ""
    reports, kept = chain(engine(Keep(place, folder), Park(CacheFolder(tmp_path / "park", 1 << 30))), plan)
    texts, kept_there = of_session(plan, keep="ram")
    assert [report.text for report in reports] == texts
    assert kept == kept_there
    assert of_session(plan)[1][1:] != kept[1:]  # without whole rows, other tokens are held
    assert all(report.kv.whole_bytes > 0 and not report.notes for report in reports)
    assert all(report.tokens.reused > 100 for report in reports[1:])


def test_without_keep_nothing_changes(engine):
    plan = pykvedge.plan("snapkv", 0.2)
    reports, kept = chain(engine(None), plan)
    assert ([report.text for report in reports], kept) == of_session(plan)
    assert all(report.kv.whole_bytes == 0 for report in reports)


def test_whole_rows_in_memory_count_and_those_on_disk_go_to_the_folder(engine, tmp_path):
    plan, bytes_of = pykvedge.plan("snapkv", 0.2), {}
    for place in ("", "ram", "disk"):
        park = Park(CacheFolder(tmp_path / f"park-{place}", 1 << 30))
        made = engine(Keep.of(place, tmp_path if place == "disk" else ""), park)
        report = asked(made, plan, QUESTIONS[:1])
        made.park._read.clear()
        if place == "disk":
            until(lambda park=park: not park.leaving and not len(park))
        bytes_of[place] = (sum(len(one) for one in park._held.values()), park.folder_bytes, report.kv.whole_bytes)
    (plain, _, none), (ram, _, whole), (disk, folder, _) = bytes_of[""], bytes_of["ram"], bytes_of["disk"]
    assert none == 0 and whole > 0
    assert ram > plain + whole * 0.9
    assert disk == 0 and folder > plain + whole * 0.9


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_what_a_job_needs_is_never_exceeded(engine, tmp_path, place):
    """Admission uses this number. On disk, an answer needs less memory when its whole rows are written."""
    made = engine(Keep.of(place, tmp_path if place == "disk" else ""))
    decoder, measure, seen = made._decoder, made._decoder._measure, []

    def noting(slots):
        measure(slots)
        for slot in slots:
            stats = decoder._driver.cache.stats(slot.sequence.number)
            assert slot.n_bytes == stats.bytes + stats.whole_bytes - stats.whole_file_bytes
            seen.append((slot.n_bytes, slot.work.need, slot.file_bytes, slot.next is not None))

    decoder._measure = noting
    chain(made, pykvedge.plan("snapkv", 0.2))
    block = 32 * made.preparer.bytes_per_token  # rows of an answer come in blocks, with and without keep
    assert all(n_bytes <= need + block for n_bytes, need, _, _ in seen)
    answering = [(need, file_bytes) for _, need, file_bytes, answers in seen if answers]
    assert any(file_bytes > 0 for _, file_bytes in answering) == (place == "disk")
    if place == "disk":
        smallest, largest = min(need for need, _ in answering), max(need for need, _ in answering)
        assert smallest < largest / 2


def test_a_conversation_that_does_not_fit_is_read_again_and_answered_alike(engine):
    """A prompt that takes more than half of the memory is not parked: it is read again, with the same plan."""
    plan = pykvedge.plan("snapkv", 0.2)
    roomy = engine(Keep("ram"))
    said = [QUESTIONS[0], asked(roomy, plan, QUESTIONS[:1]).text, QUESTIONS[1]]
    expected = asked(roomy, plan, said)
    n_bytes = expected.kv.whole_bytes + expected.kv.kept_bytes
    tight = engine(Keep("ram"), memory=n_bytes * 7 // 4)
    assert asked(tight, plan, said[:1]).text == said[1]
    found = asked(tight, plan, said)
    assert found.tokens.reused == 0 < expected.tokens.reused
    assert found.text == expected.text


def test_over_http(environment, tmp_path):
    plan = ("--method", "snapkv", "--budget", "0.2")
    arguments = (*plan, "--keep", "disk", "--keep-folder", tmp_path, "--memory", "64MiB")
    texts, _ = of_session(pykvedge.plan("snapkv", 0.2), keep="disk", keep_folder=str(tmp_path))
    with serving(environment, *arguments) as server:
        messages, found = asks(QUESTIONS[0], SCENES[0]), []
        for i, question in enumerate(QUESTIONS):
            messages = then(messages, found[-1], question) if i else messages
            answer = server.chat(messages, max_tokens=GREEDY.max_tokens).json()
            found.append(answer["choices"][0]["message"]["content"])
            figures = answer["kvedge"][0]
            assert figures["kv"]["whole_bytes"] > figures["kv"]["kept_bytes"] and "notes" not in figures
        assert [text.strip() for text in found] == [text.strip() for text in texts]
        memory = server.memory()
        assert memory["kv_file_bytes"] == 0 and server.metric("kv_file_bytes") == 0
        assert memory["folder_bytes"] > 0
