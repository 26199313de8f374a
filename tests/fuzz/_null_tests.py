"""Makes the model of the contract and the hand-made producers of tests/null importable from here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "null"))
