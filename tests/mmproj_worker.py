"""Answers about a picture with each of many mmproj files: `mmproj_worker.py MODEL PICTURE MMPROJ...`.

A line for each file says `refused`, with the reason, or `ran`. A crash ends it before all lines are said.
"""

import sys

import pykvedge
from pykvedge.runtime.sampling import Sampling


def main() -> None:
    model, picture, *files = sys.argv[1:]
    for file in files:
        try:
            with pykvedge.Session(model, file, pykvedge.plan("full"), threads=1) as session:
                session.ask("What is this?", [picture], Sampling(max_tokens=1)).read()
            print("ran", flush=True)
        except pykvedge.KvedgeError as error:
            print(f"refused {error}", flush=True)


if __name__ == "__main__":
    main()
