"""Importing this module puts scripts/ on the import path, so that experiments can use its helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
