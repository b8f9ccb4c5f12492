"""Importing this module puts scripts/ on the import path: its helpers serve experiments, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
