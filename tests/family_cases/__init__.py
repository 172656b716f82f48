"""One tiny checkpoint for every family, and more where a family has several forms."""

from .case import Case
from .deepseek import DEEPSEEK
from .ernie import ERNIE
from .exaone import EXAONE
from .mimo import MIMO
from .qwen import QWEN

CASES: dict[str, Case] = {case.name: case for case in (*DEEPSEEK, *ERNIE, *EXAONE, *MIMO, *QWEN)}
