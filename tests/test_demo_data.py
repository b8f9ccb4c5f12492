"""The demo model's scenes, questions and evaluation sets: reproducible, held out, and equal to the published sets."""

import hashlib
import itertools
import json
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
from eval_runs import MMPROJ, MODEL, prompt
from PIL import Image

from kvedge_lab.demo_tasks import evalset, tasks
from kvedge_lab.demo_tasks.prompts import MEDIA, messages
from kvedge_lab.demo_tasks.scenes import PARTS, Scene, draw_scene
from kvedge_lab.eval.tasks import demo_samples

DATA = Path(__file__).parent / "data" / "demo"


def take(task: str, count: int, **options) -> list[evalset.Sample]:
    return list(itertools.islice(evalset.samples(task, **options), count))


def scenes_of(seed: int, count: int, held_out: bool) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [draw_scene(rng, held_out) for _ in range(count)]


def test_scenes_follow_from_their_seed():
    assert scenes_of(3, 20, False) == scenes_of(3, 20, False)
    assert scenes_of(3, 20, False) != scenes_of(4, 20, False)


def test_no_code_is_on_both_sides():
    training = {s.code for s in scenes_of(0, 1000, False)}
    held_out = {s.code for s in scenes_of(1, 1000, True)}
    assert not training & held_out
    assert not any(s.held_out for s in scenes_of(5, 200, False))


def digest_of(samples) -> str:
    """Returns a digest of everything drawn: pictures, messages, answers, and the cells of their sources."""
    digest = hashlib.sha256()
    for sample in samples:
        for picture in sample.images():
            digest.update(picture.tobytes())
        said = [sample.messages(), sample.answer, sample.question.sources]
        digest.update(json.dumps(said, default=int).encode())
    return digest.hexdigest()[:16]


DRAWN = {  # first 24 samples of seed 11; eight samples of seed 3 with eight images, asked in a second turn
    "colour": ("cfdfb9f5a70c6f02", "792b281549bac662"),
    "shape": ("b017d18ee74353e6", "39daee6dce5a60cc"),
    "count": ("8ef6e070702baa5b", "a201c90e72856def"),
    "where": ("ff09257d3f5f5668", "b6e691d1ae2394bc"),
    "code": ("721098c717b2bf1c", "558c3fdeeae04767"),
    "describe": ("a5a3cfa133de9c54", "f170ecba6c3394f2"),
    "which-image": ("a8d0302c63622482", "7cee10af166b03f9"),
    "code-in-image-k": ("6fe90324cd697149", "ef9929e56c17a5b9"),
    "difference": ("41510872f24a998d", "fd70525ace03da18"),
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_are_those_that_figures_were_published_of(task):
    """If scenes or questions were drawn differently, published figures could not be compared any more."""
    sets = take(task, 24, seed=11), take(task, 8, seed=3, images=8, second_turn=True)
    assert tuple(map(digest_of, sets)) == DRAWN[task]


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("second_turn", [False, True])
def test_samples_follow_from_their_seed(task, second_turn):
    first = take(task, 5, seed=7, second_turn=second_turn)
    assert first == take(task, 5, seed=7, second_turn=second_turn)
    assert first != take(task, 5, seed=8, second_turn=second_turn)
    assert len(set(map(repr, first))) == 5


def test_messages_have_a_marker_per_image():
    for count, second in itertools.product((1, 2, 8), (False, True)):
        turns = messages(count, "What is the code?", second)
        assert sum(t["content"].count(MEDIA) for t in turns) == count
        assert [t["role"] for t in turns] == (["user", "assistant", "user"] if second else ["user"])
        assert turns[-1]["content"].endswith("What is the code?")
        assert MEDIA not in turns[-1]["content"] or not second


def test_unknown_tasks_and_counts_are_refused():
    with pytest.raises(ValueError, match="unknown task 'size'"):
        next(evalset.samples("size"))
    with pytest.raises(ValueError, match="needs two or more images"):
        next(evalset.samples("which-image", images=1))


def test_sets_are_written_and_read(tmp_path):
    chosen = take("colour", 2) + take("which-image", 1, images=3, second_turn=True)
    path = evalset.write_set(tmp_path, chosen)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["answer"] for line in lines] == [s.answer for s in chosen]
    for line, sample in zip(lines, chosen, strict=True):
        assert line["messages"] == sample.messages()
        for name, picture in zip(line["images"], sample.images(), strict=True):
            with Image.open(tmp_path / name) as file:
                assert (np.asarray(file.convert("RGB")) == picture).all()


def test_the_fixed_set_is_what_the_generator_draws(tmp_path):
    fixed = (DATA / "samples.jsonl").read_text(encoding="utf-8")
    assert evalset.write_set(tmp_path, evalset.fixed_set()).read_text(encoding="utf-8") == fixed
    for line in map(json.loads, fixed.splitlines()):
        assert all((DATA / name).exists() for name in line["images"])


def test_the_chat_template_of_the_packaged_model_writes_the_prompt():
    field = gguf.GGUFReader(MODEL).fields["tokenizer.chat_template"]
    template = jinja2.Environment().from_string(field.contents())
    for count, second in itertools.product((1, 4), (False, True)):
        turns = messages(count, "Describe image 1.", second)
        assert template.render(messages=turns, add_generation_prompt=True) == prompt(turns)


def test_the_files_of_the_packaged_model_are_small():
    assert MODEL.stat().st_size + MMPROJ.stat().st_size <= 12 * 1024 * 1024


def test_no_scene_is_in_two_parts():
    codes, names = {}, ("code", "difference", "code-in-image-k", "code+where", "which-image+code-in-image-k")
    for part in PARTS:
        found = [s for name in names for s in demo_samples(name, 8, 1, 3, part)]
        assert len({sample.id for sample in found}) == 40
        codes[part] = {scene.code for sample in found for line in sample.lines for scene in line.images}
        assert all(scene.held_out for sample in found for line in sample.lines for scene in line.images)
    assert not codes["search"] & codes["validation"] and not codes["search"] & codes["test"]
    assert not codes["validation"] & codes["test"]
    with pytest.raises(ValueError, match="unknown part"):
        demo_samples("code", 1, 0, 4, "other")
    with pytest.raises(ValueError, match="unknown part"):
        demo_samples("code+where", 1, 0, 4, "other")
