"""One tiny checkpoint for every family, and more where a family has several forms."""

from .case import Case
from .deepseek import DEEPSEEK
from .ernie import ERNIE
from .exaone import EXAONE
from .longcat import LONGCAT
from .mimo import MIMO
from .nemotron_h import NEMOTRON_H
from .qwen import QWEN
from .step3p5 import STEP3P5

_ALL = (*DEEPSEEK, *ERNIE, *EXAONE, *LONGCAT, *MIMO, *NEMOTRON_H, *QWEN, *STEP3P5)
CASES: dict[str, Case] = {case.name: case for case in _ALL}
