"""Puts a fault into shipped code: a function's source with one place replaced, compiled anew.

Only the function's code is exchanged, in place: whoever imported it runs the fault, and nothing has
to be imported again.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` stands once in the source of ``where``; ``checks`` are to catch it."""

    name: str
    where: str  # module:function or module:Class.method
    old: str
    new: str
    checks: tuple[str, ...]


def function_of(where: str):
    module, _, path = where.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def mutated(function, old: str, new: str):
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {function}"
    tree = ast.parse(source.replace(old, new))
    tree.body[0].decorator_list = []
    flags = __future__.annotations.compiler_flag
    code = compile(tree, f"<mutant of {function.__name__}>", "exec", flags, dont_inherit=True)
    names = dict(function.__globals__)
    exec(code, names)
    return names[function.__name__].__code__


@contextmanager
def applied(mutant: Mutant):
    function = function_of(mutant.where)
    shipped = function.__code__
    function.__code__ = mutated(function, mutant.old, mutant.new)
    try:
        yield
    finally:
        function.__code__ = shipped
