"""Which cases transformers' ``MtpModel`` was run on, and on what: scripts/record_mtp_fixtures.py.

The class knows the heads of deepseek_v3 and glm4_moe. Of the others it was given transformers' own
decoder layers: what they compute is theirs, how a head puts them together is that of the first two.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from family_cases import CASES
from references import deepseek

NAMES = (
    "deepseek_v3", "deepseek_v3_two_heads_mlx", "glm4_moe", "glm4_moe_two_heads_mlx",
    "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite_mlx",
)  # fmt: skip
PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]


def case(name):
    return CASES[name]


def path(name) -> Path:
    return Path(__file__).parent / "fixtures" / f"mtp_{name}.safetensors"


def published(case):
    """The case's weights in the names and the parts that transformers reads."""
    apart = deepseek.published(case.weights(), case.config)
    return {name: np.ascontiguousarray(value) for name, value in apart.items()}


def fingerprint(case) -> str:
    """Of the weights: another stream of NumPy's generator would be another checkpoint."""
    digest = hashlib.sha256()
    for name, value in sorted(case.weights().items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()
