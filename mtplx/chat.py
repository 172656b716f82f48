"""Renders a model's chat template (Jinja) in a sandbox, the way such templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtplx.errors import ModelError, RequestError


class _Refusal(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here only its body counts."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters; a prompt must hold them as they are.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template. ``variables`` are the names it may use besides the messages."""

    def __init__(self, source: str, variables: Mapping[str, Any]):
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._variables = dict(variables)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as e:
            raise ModelError(f"the model's chat template does not compile: {e}") from e

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt's text; ``RequestError`` for messages that are malformed or refused."""
        if not messages:
            raise RequestError("messages is empty")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{i}] is not a mapping with a role")
            if "content" not in message:
                raise RequestError(f"messages[{i}] has no content")
        try:
            return self._template.render(
                {
                    **self._variables,
                    "messages": [dict(m) for m in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _Refusal as e:
            raise RequestError(f"the chat template refuses these messages: {e}") from e
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise RequestError(f"the chat template fails on these messages: {e}") from e
