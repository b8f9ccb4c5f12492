"""Write tiny random-weight GGUF models for tests: DIR/<kind>/model.gguf, and mmproj.gguf for vision kinds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modelgen.tiny import DEFAULT_SPEC, KINDS, TinySpec, default_spec, write_tiny

__all__ = ["DEFAULT_SPEC", "KINDS", "TinySpec", "default_spec", "write_tiny"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to write; made if missing")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this one (repeatable)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        for kind in args.kind or KINDS:
            for path in write_tiny(kind, args.dir / kind):
                if path:
                    print(path)
    except OSError as error:
        print(f"make_tiny_models.py: cannot write: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
