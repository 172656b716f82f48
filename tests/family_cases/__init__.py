"""One tiny checkpoint for every family, and more where a family has several forms."""

from .case import Case
from .longcat import LONGCAT
from .nemotron_h import NEMOTRON_H
from .qwen import QWEN
from .step3p5 import STEP3P5

CASES: dict[str, Case] = {case.name: case for case in (*LONGCAT, *NEMOTRON_H, *QWEN, *STEP3P5)}
