"""Answers with each of many files: `file_worker.py models MODEL...`, or `mmprojs MODEL PICTURE MMPROJ...`.

A line for each file says `refused`, with the reason, or `ran`. A crash ends it before all lines are said.
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
