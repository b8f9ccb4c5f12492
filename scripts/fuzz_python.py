"""Runs readers in Python under atheris: `fuzz_python.py TARGET [arguments of libFuzzer]`, for fuzz.py."""

import contextlib
import random
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import atheris

# the loader of an editable install bypasses atheris, so modules must be found here by path
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.meta_path.sort(key=lambda finder: finder is not PathFinder)

with atheris.instrument_imports(include=["pykvedge", "kvedge_lab", "PIL", "fuzz_readers"]):
    from fuzz_readers import TARGETS, first_inputs

    from pykvedge.errors import KvedgeError


def main() -> None:
    target, structured = TARGETS[sys.argv[1]]
    for path in first_inputs(sys.argv[1]):
        try:
            target(path.read_bytes())
        except KvedgeError as error:  # with a refused first input, the fuzzer would reach little
            sys.exit(f"error: {path.name}, which is right, is refused: {error}")

    def one_input(data: bytes) -> None:
        with contextlib.suppress(KvedgeError):
            target(data)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if structured is not None and rng.random() < 0.5:
            return structured(bytes(data), rng)[:most]
        return atheris.Mutate(data, most)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
