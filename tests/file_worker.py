"""Asks for an answer with each of many files: `file_worker.py models MODEL...`, or `mmprojs MODEL PICTURE MMPROJ...`.

Prints one line for each file: `refused` and the reason, or `ran`. After a crash, lines are missing.
"""

import sys

import pykvedge
from pykvedge.runtime.sampling import Sampling


def main() -> None:
    what, *files = sys.argv[1:]
    pictures = []
    if what == "mmprojs":
        model, picture, *files = files
        pictures = [picture]
    for file in files:
        try:
            pair = (model, file) if what == "mmprojs" else (file, None)
            with pykvedge.Session(*pair, pykvedge.plan("full"), threads=1, n_ctx=256) as session:
                session.ask("What is this?", pictures, Sampling(max_tokens=1)).read()
            print("ran", flush=True)
        except pykvedge.KvedgeError as error:
            print(f"refused {error}", flush=True)


if __name__ == "__main__":
    main()
