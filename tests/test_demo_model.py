"""The packaged model, end to end: its answers are right, and stay right if the kept pairs allow it."""

import json
import re
from itertools import islice

import pytest
from choosing import whole
from conftest import ROOT

import pykvedge
from kvedge_lab.demo_tasks.evalset import samples
from pykvedge.models.images import Picture

DATA = ROOT / "pykvedge" / "data"
FIXED = ROOT / "tests" / "data" / "demo"
COUNT = 8  # samples of a task


@pytest.fixture(scope="module")
def session():
    with pykvedge.Session(DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf", pykvedge.plan("full")) as opened:
        yield opened


def scenes() -> dict[str, str]:
    """Returns {file name: description} of the pictures in examples/."""
    text = (ROOT / "examples" / "scenes.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^- \[([\w-]+\.png)\]\(.*?\): (.*)$", text, re.MULTILINE))


def ask(session, images, messages) -> str:
    """Returns the answer to the last message. The images come with the first message."""
    session.clear()
    shown = images
    for message in messages:
        if message["role"] == "user":
            text = message["content"].rsplit("<__media__>\n", 1)[-1]  # the session adds the markers
            answer = session.ask(text, shown).read().strip()
            shown = []
    return answer


def test_chat_without_other_arguments_answers_about_a_scene(kvedge):
    name, description = next(iter(scenes().items()))
    done = kvedge("chat", "--image", ROOT / "examples" / name, "What is the code?")
    assert (done.code, done.out.strip()) == (0, re.search(r"the code (\w+) at", description)[1])


def test_every_scene_is_read_by_default(session):
    session.set_plan(pykvedge.default_plan())
    for name, description in scenes().items():
        for asked, answer in (
            ("What is the code?", re.search(r"the code (\w+) at", description)[1]),
            ("Describe the image.", description),
        ):
            assert ask(session, [ROOT / "examples" / name], [{"role": "user", "content": asked}]) == answer


def test_every_task_is_answered_in_both_turns(session):
    session.set_plan(pykvedge.default_plan())
    wrong = []
    for line in (FIXED / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        answer = ask(session, [FIXED / name for name in sample["images"]], sample["messages"])
        wrong += [(sample["task"], answer, sample["answer"])] * (answer != sample["answer"])
    assert not wrong


def right(session, task: str, method: str, budget: float) -> int:
    """Returns how many of COUNT held-out samples are answered exactly."""
    session.set_plan(pykvedge.plan(method, budget))
    n = 0
    for sample in islice(samples(task, 3, 4), COUNT):
        session.clear()
        shown = [Picture(f"{i}", x.shape[1], x.shape[0], x.tobytes()) for i, x in enumerate(sample.images())]
        n += session.ask(sample.question.text, shown).read().strip() == sample.answer
    return n


@pytest.mark.parametrize("task", ["code-in-image-k", *whole("code")])
def test_what_is_kept_decides_whether_a_code_can_be_read(session, task):
    full = right(session, task, "full", 1.0)
    assert full >= COUNT - 1
    assert right(session, task, "streaming-llm", 0.2) <= full // 2
    assert right(session, task, "flashcache", 0.2) >= full - 1


def test_a_budget_of_about_the_window_still_reads_codes(session):
    """A fifth of a prompt with one image is 34 pairs. A budget of 24 is smaller than the window of 32."""
    assert right(session, "code", "mixkv", 0.2) >= COUNT - 1
    assert right(session, "code", "snapkv", 0.2) >= COUNT - 3
    assert right(session, "code", "mixkv-sparsemm", 24) >= COUNT - 3
