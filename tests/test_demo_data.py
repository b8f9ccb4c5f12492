"""The demo model's scenes, questions and evaluation sets: seeded, held out, and right."""

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
from kvedge_lab.demo_tasks.font import CODE_CHARS
from kvedge_lab.demo_tasks.prompts import MEDIA, messages
from kvedge_lab.demo_tasks.scenes import (
    CELL,
    COLOURS,
    GRID,
    IMAGE_SIZE,
    PARTS,
    SHAPES,
    Item,
    Scene,
    draw_scene,
    render,
)
from kvedge_lab.eval.tasks import demo_samples

DATA = Path(__file__).parent / "data" / "demo"
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")


def take(task: str, count: int, **options) -> list[evalset.Sample]:
    return list(itertools.islice(evalset.samples(task, **options), count))


def region(item: Item) -> str:
    return f"{ROWS[item.row // 4]} {COLUMNS[item.col // 4]}"


def scenes_of(seed: int, count: int, held_out: bool) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [draw_scene(rng, held_out) for _ in range(count)]


def test_scenes_follow_from_their_seed():
    assert scenes_of(3, 20, False) == scenes_of(3, 20, False)
    assert scenes_of(3, 20, False) != scenes_of(4, 20, False)


def test_no_code_is_on_both_sides():
    training = {s.code for s in scenes_of(0, 3000, False)}
    held_out = {s.code for s in scenes_of(1, 3000, True)}
    assert not training & held_out
    assert not any(s.held_out for s in scenes_of(5, 200, False))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_evaluation_samples_are_held_out(task):
    assert all(s.held_out for sample in take(task, 30) for s in sample.scenes)


DRAWN = {  # of the first 24 samples of seed 11: pictures, questions, answers
    "colour": "d178f292c0d6dbfc",
    "shape": "07daaec6964910a1",
    "count": "00fbc20f015fb253",
    "where": "477fdca26c28d9bd",
    "code": "f3b82210e4e3a218",
    "describe": "21c25aed4fd3e19f",
    "which-image": "11029b427282f84d",
    "code-in-image-k": "13c065edc663f6a3",
    "difference": "d1e057addd9b8663",
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_are_those_that_figures_were_published_of(task):
    """A scene or a question that is drawn otherwise makes them other samples, whose figures compare with none."""
    digest = hashlib.sha256()
    for sample in take(task, 24, seed=11):
        for picture in sample.images():
            digest.update(picture.tobytes())
        digest.update(f"{sample.question.text}\0{sample.answer}\0".encode())
    assert digest.hexdigest()[:16] == DRAWN[task]


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("second_turn", [False, True])
def test_samples_follow_from_their_seed(task, second_turn):
    first = take(task, 5, seed=7, second_turn=second_turn)
    assert first == take(task, 5, seed=7, second_turn=second_turn)
    assert first != take(task, 5, seed=8, second_turn=second_turn)
    assert len(set(map(repr, first))) == 5


def test_things_keep_to_their_cells():
    for scene in scenes_of(0, 300, False):
        cells = [(i.row, i.col) for i in scene.items]
        cells += [(scene.code_row, scene.code_col + k) for k in range(len(scene.code))]
        assert len(set(cells)) == len(cells)
        assert all(0 <= r < GRID and 0 <= c < GRID for r, c in cells)
        assert all(i.dy >= 0 and i.dx >= 0 and max(i.dy, i.dx) + i.size <= CELL for i in scene.items)
        assert 3 <= len(scene.items) <= 6
        assert 4 <= len(scene.code) <= 6 and set(scene.code) <= set(CODE_CHARS)
        assert list(scene.items) == sorted(scene.items, key=lambda i: (i.row, i.col))


def test_pictures_show_each_thing_in_its_cell_and_nothing_else():
    for scene in scenes_of(2, 50, True):
        picture = render(scene)
        assert picture.shape == (IMAGE_SIZE, IMAGE_SIZE, 3) and picture.dtype == np.uint8
        drawn = (picture != np.array(scene.background, np.uint8)).any(-1)
        cells = drawn.reshape(GRID, CELL, GRID, CELL).any((1, 3))
        expected = np.zeros((GRID, GRID), bool)
        for item in scene.items:
            expected[item.row, item.col] = True
            middle = picture[item.row * CELL :, item.col * CELL :][:CELL, :CELL].reshape(-1, 3).astype(int)
            near = abs(middle - np.array(COLOURS[item.colour])).max(-1).min()
            assert near <= 12
        expected[scene.code_row, scene.code_col : scene.code_col + len(scene.code)] = True
        assert (cells == expected).all()


def test_shapes_differ():
    size = 16
    pictures = [
        render(Scene((Item(s, "black", 2, 2, size, 2, 2),), "AAAA", 8, 2))[2 * CELL : 3 * CELL, 2 * CELL : 3 * CELL]
        for s in SHAPES
    ]
    for a, b in itertools.combinations(pictures, 2):
        assert (a != b).any(-1).sum() > 20


def words(sentence: str) -> list[str]:
    return sentence.rstrip("?.").split()


def test_colour_shape_count_and_where():
    for sample in take("colour", 40):
        shape = words(sample.question.text)[-1]
        assert [i.colour for i in sample.scenes[0].items if i.shape == shape] == [sample.answer]
    for sample in take("shape", 40):
        colour = words(sample.question.text)[-2]
        assert [i.shape for i in sample.scenes[0].items if i.colour == colour] == [sample.answer]
    numbers = ("zero", "one", "two", "three", "four", "five")
    counts = set()
    for sample in take("count", 80):
        shape = {f"{s}es" if s == "cross" else f"{s}s": s for s in SHAPES}[words(sample.question.text)[2]]
        count = sum(i.shape == shape for i in sample.scenes[0].items)
        assert sample.answer == numbers[count]
        counts.add(count)
    assert counts == {1, 2, 3, 4, 5}
    for sample in take("where", 40):
        colour, shape = words(sample.question.text)[-2:]
        (item,) = (i for i in sample.scenes[0].items if (i.colour, i.shape) == (colour, shape))
        assert sample.answer == f"at the {region(item)}"


def test_codes_and_descriptions():
    for sample in take("code", 20):
        assert sample.answer == sample.scenes[0].code
    for sample in take("describe", 20):
        scene = sample.scenes[0]
        parts = sample.answer.rstrip(".").split(", ")
        assert len(parts) == len(scene.items) + 1
        for part, item in zip(parts, scene.items, strict=False):
            assert part.split()[0] == ("an" if item.colour == "orange" else "a")
            assert part.split(maxsplit=1)[1] == f"{item.colour} {item.shape} at the {region(item)}"
        assert parts[-1].startswith(f"and the code {scene.code} at the ")


@pytest.mark.parametrize("images", [2, 4, 8])
def test_needles(images):
    for sample in take("which-image", 20, images=images):
        assert len(sample.scenes) == images
        colour, shape = words(sample.question.text)[-2:]
        found = [(k, i) for k, s in enumerate(sample.scenes) for i in s.where(shape, colour)]
        ((k, item),) = found
        assert sample.answer == f"image {k + 1}, at the {region(item)}"
    for sample in take("code-in-image-k", 20, images=images):
        k = int(words(sample.question.text)[-1])
        assert sample.answer == sample.scenes[k - 1].code


def test_differences():
    for sample in take("difference", 40):
        a, b = sample.scenes
        (pair,) = ((x, y) for x, y in zip(a.items, b.items, strict=True) if x != y)
        x, y = pair
        assert (x.shape, x.row, x.col) == (y.shape, y.row, y.col)
        expected = f"the {x.shape} at the {region(x)} is {x.colour} in image 1 and {y.colour} in image 2"
        assert sample.answer == expected
        assert (render(a) != render(b)).any()


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_word_of_an_answer_has_a_source(task):
    for sample in take(task, 20):
        assert len(sample.question.sources) >= len(sample.answer.split())
        for cells in sample.question.sources:
            assert cells and all(0 <= k < len(sample.scenes) for k, _, _ in cells)


def test_messages_have_a_marker_per_image():
    for count, second in itertools.product((1, 2, 8), (False, True)):
        turns = messages(count, "What is the code?", second)
        assert sum(t["content"].count(MEDIA) for t in turns) == count
        assert [t["role"] for t in turns] == (["user", "assistant", "user"] if second else ["user"])
        assert turns[-1]["content"].endswith("What is the code?")
        assert MEDIA not in turns[-1]["content"] or not second


def test_unknown_tasks_and_counts_are_refused():
    with pytest.raises(ValueError, match="no task is called 'size'"):
        next(evalset.samples("size"))
    with pytest.raises(ValueError, match="two images or more"):
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
    with pytest.raises(ValueError, match="no part"):
        demo_samples("code", 1, 0, 4, "other")
    with pytest.raises(ValueError, match="no part"):
        demo_samples("code+where", 1, 0, 4, "other")
