"""One tiny checkpoint for every family, and more where a family has several forms."""

from .case import Case
from .ernie import ERNIE
from .exaone import EXAONE
from .mimo import MIMO
from .qwen import QWEN

CASES: dict[str, Case] = {case.name: case for case in (*ERNIE, *EXAONE, *MIMO, *QWEN)}
