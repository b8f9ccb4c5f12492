"""Write the scenes of examples/, for people to try, and tests/data/demo, the fixed evaluation set."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvedge_lab.demo_tasks.evalset import fixed_set, write_set  # noqa: E402
from kvedge_lab.demo_tasks.scenes import draw_scene, render  # noqa: E402
from kvedge_lab.demo_tasks.tasks import ask_difference, describe, recolour  # noqa: E402

SEED, SCENES = 11, 4


def main() -> int:
    rng = np.random.default_rng(SEED)
    scenes = {f"scene-{k + 1}.png": draw_scene(rng, held_out=True) for k in range(SCENES)}
    changed, which = recolour(rng, scenes["scene-1.png"])
    difference = ask_difference(scenes["scene-1.png"], changed, which)
    scenes["scene-1-changed.png"] = changed
    folder = ROOT / "examples"
    folder.mkdir(exist_ok=True)
    lines = ["# Scenes for the demo model", "", "Drawn by `experiments/write_examples.py`; none was trained on.", ""]
    for name, scene in scenes.items():
        Image.fromarray(render(scene)).save(folder / name, optimize=True)
        lines += [f"- [{name}]({name}): {describe(scene)}"]
    first, *others = [Image.open(folder / name) for name in list(scenes)[:SCENES]]
    dates = dict.fromkeys(("creationDate", "modDate"), time.gmtime(0))  # the same bytes each time
    first.save(folder / "scenes.pdf", save_all=True, append_images=others, quality=95, **dates)
    lines += ["", f"Between `scene-1.png` and `scene-1-changed.png`: {difference.answer}.", ""]
    (folder / "scenes.md").write_text("\n".join(lines), encoding="utf-8")
    write_set(ROOT / "tests" / "data" / "demo", fixed_set())
    return 0


if __name__ == "__main__":
    sys.exit(main())
