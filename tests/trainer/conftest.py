"""Make the reference implementations importable by the tests beside them."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "objective"))
torch.set_num_threads(1)
