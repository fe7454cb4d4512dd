"""Where chat templates run: a jinja environment that cannot reach Python, and in which nothing runs on for ever.

A template that writes nothing is asked nothing by whoever counts what it writes, so time is looked at where a template can
turn round: at each step of a loop and at each call. A product or a power that would be huge is refused before it is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

TICK: Final = "\ue0f3tick"
"""The variable with what is called at each step; it raises to end the rendering. No template can spell it."""
MOST: Final = 1 << 22
"""Items of a repeated text or list, and bits of a power."""
_STEPS: Final = "steps"


class TemplateRaised(TemplateError):
    """A template called raise_exception: its message is for the caller (FR-63)."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, with what templates of public models expect."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.filters["tojson"] = _tojson
        self.filters[_STEPS] = _steps
        self.globals["raise_exception"] = _raise

    def read(self, source: str) -> nodes.Template:
        """The tree of a template whose loops tick. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            ticking = nodes.Filter(loop.iter, _STEPS, [], [], None, None, lineno=loop.lineno)
            loop.iter = ticking.set_environment(self)
        return tree

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call that a template makes, macros among them."""
        _tick_of(context)()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power. Raises SecurityError: it would be huge."""
        if operator == "**":
            size = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        else:
            size = _length(left) * _length(right) if isinstance(left, int) != isinstance(right, int) else 0
        if size > MOST:
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark answers for training: here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick_of(context: Context) -> Callable[[], None]:
    tick: Callable[[], None] = context[TICK]
    return tick


@pass_context
def _steps(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each after a tick."""
    tick = _tick_of(context)
    for item in items:
        tick()
        yield item


def _length(value: Any) -> int:
    """Times that a number repeats, items of what is repeated; 0 of what cannot be either."""
    return value if isinstance(value, int) else len(value) if isinstance(value, str | list | tuple) else 0


def _tojson(value: object, indent: int | None = None, **options: Any) -> str:
    """As Hugging Face's templates expect it: no HTML escapes, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateRaised(message)
