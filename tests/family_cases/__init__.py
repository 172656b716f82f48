"""One tiny checkpoint for every family, and more where a family has several forms."""

from .case import Case
from .qwen import QWEN
from .step3p5 import STEP3P5

CASES: dict[str, Case] = {case.name: case for case in (*QWEN, *STEP3P5)}
