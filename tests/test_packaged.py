"""The packaged model is asked about a photograph: one line says that it only knows drawn scenes."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from server import picture, serving

import pykvedge
from kvedge_lab.demo_tasks.scenes import draw_scene, render
from pykvedge.models.images import load_picture
from pykvedge.models.packaged import PACKAGED, hints, is_scene

EXAMPLES = Path(__file__).parent.parent / "examples"
PHOTO = EXAMPLES / "photo.jpg"
SAID = (
    "the packaged model knows drawn scenes only, and photo.jpg is not a drawn scene; use another model with -m or -hf"
)


def test_drawn_scenes_are_told_from_other_pictures():
    rng = np.random.default_rng(5)
    for _ in range(40):
        scene = Image.fromarray(render(draw_scene(rng)))
        file = io.BytesIO()
        scene.resize((300, 300)).save(file, "JPEG", quality=60)
        assert is_scene(load_picture(scene)) and is_scene(load_picture(file))
    for path in EXAMPLES.glob("*.png"):
        assert is_scene(load_picture(path)), path
    photo = Image.open(PHOTO)
    for size in ((240, 240), (40, 40), photo.size):
        assert not is_scene(load_picture(photo.resize(size)))
    assert not is_scene(load_picture(Image.new("RGB", (800, 600), "white")))
    assert not is_scene(load_picture(Image.fromarray(rng.integers(0, 255, (240, 240, 3)).astype(np.uint8))))
    assert hints(PACKAGED, [load_picture(EXAMPLES / "scene-1.png"), load_picture(PHOTO)]) == [SAID]
    assert hints(Path("other.gguf"), [load_picture(PHOTO)]) == []


def test_a_server_says_it_in_its_response(environment):
    with serving(environment) as server:
        for path, notes in ((PHOTO, [SAID.replace("photo.jpg", "picture 1")]), (EXAMPLES / "scene-1.png", [])):
            content = [{"type": "text", "text": "What is it?"}, picture(path)]
            said = server.chat([{"role": "user", "content": content}], max_tokens=2).json()
            assert said["kvedge"][0].get("notes", []) == notes


def test_chat_says_it_once(kvedge):
    asked = ["--threads", 1, "--max-tokens", 2]
    done = kvedge("chat", *asked, "--image", PHOTO, "What is it?")
    assert done.code == 0 and done.err.splitlines()[0] == f"kvedge: {SAID}"
    assert kvedge("chat", *asked, "--image", PHOTO, "--quiet", "What is it?").err == ""
    assert "knows drawn scenes" not in kvedge("chat", *asked, "--image", EXAMPLES / "scene-2.png", "What?").err


def test_a_question_without_a_picture_gets_the_reason_once(kvedge):
    blind = "the packaged model knows drawn scenes only, and this question has no picture; give one, or use another"
    with pykvedge.Session(threads=1) as session:
        for question, number in (("Hello", 1), ("And?", 0)):
            answer = session.ask(question)
            answer.read()
            assert sum(note.startswith(blind) for note in answer.report.notes) == number
    with pykvedge.Session(threads=1) as session:  # the second message is about the picture of the first one
        for images in (EXAMPLES / "scene-1.png", ()):
            assert session.ask("What is the code?", images).report.notes == []
    asked = ["--threads", 1, "--max-tokens", 1, "Hello"]
    assert kvedge("chat", *asked).err.startswith(f"kvedge: {blind}")
    assert kvedge("chat", "--quiet", *asked).err == ""
