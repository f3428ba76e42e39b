"""BoundedEnvironment: Jinja for templates that nobody vouches for.

Jinja's sandbox keeps a template away from Python, and not from `'%1000000000d' % 1` or loops in
loops. Here each render has a budget of units, about one per character written, element made, and
node of the template run. It is spent before the work is done:

- loops spend the size of their body for each round, macros, blocks and recursive loops that of the
  whole template for each call;
- operators, literals, slices, filters and calls spend the size of what they make, and those whose
  result may be much larger than what they were given (`*`, `**`, `%`, replace, join, format,
  center, ...) spend it before they make it;
- what looks into a value as a whole (output, `~`, comparisons, most filters) spends all that stands
  in it, as often as it does: a list that holds one list twice, which holds another twice, is short,
  and its text is not.

Filters for web pages (urlize, xmlattr, wordwrap, pprint, filesizeformat) and `lipsum` are left out,
as are the few methods of strings and integers that no chat template needs and whose result has any
size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jinja2 import Template
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from photon_ext.models.text.template_budget import (
    MOST_BITS,
    MOST_WIDTH,
    Budget,
    TemplateLimit,
    budgeted,
    current,
    format_size,
    percent_size,
)
from photon_ext.models.text.template_marks import mark, tree_size

_ROUNDS = 8  # how often a template may go over its messages, with all that stands in it
_MOST_JSON_WIDTH = 32  # of an indentation or a separator
_MISSING_FILTERS = ("urlize", "xmlattr", "wordwrap", "pprint", "filesizeformat")
_MISSING_METHODS = ("translate", "maketrans", "expandtabs", "to_bytes")
# Filters that do not look into the elements that they are given.
_SHALLOW_FILTERS = {
    "attr",
    "count",
    "d",
    "default",
    "first",
    "items",
    "last",
    "length",
    "list",
    "map",
}
_SHALLOW_FILTERS |= {"reject", "rejectattr", "reverse", "safe", "select", "selectattr"}
_DEEP_TESTS = {
    "in",
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lower",
    "upper",
    "lt",
    "<",
    "lessthan",
    "le",
}
_DEEP_TESTS |= {"<=", "gt", ">", "greaterthan", "ge", ">="}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one template.

    Add filters and globals, then `compile_bounded`, then `render_bounded`.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_weighed, **options)
        self._size = 1
        del self.globals["lipsum"]
        for name in _MISSING_FILTERS:
            del self.filters[name]
        self.filters.update(replace=_replace, tojson=_tojson)

    def compile_bounded(self, source: str) -> Template:
        """Compiles a template, with the marks that make it spend.

        Raises:
            TemplateLimit: what is constant in it is too large. Exception: what Jinja or Python's
                compiler raise on a template that is damaged.
        """
        self.filters.update({name: _bounded(name, each) for name, each in self.filters.items()})
        tests: dict[str, Any] = self.tests
        tests.update({name: _weighing(tests[name]) for name in _DEEP_TESTS})
        tree = self.parse(source)
        self._size = tree_size(tree)
        mark(tree, self)
        with budgeted(Budget({}, 0)):
            code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def render_bounded(
        self, template: Template, variables: Mapping[str, Any], messages: int
    ) -> str:
        """What the template of this environment makes of `variables`, among them so many messages.

        Raises:
            TemplateLimit: it would take more than its budget. Exception: whatever its code raises.
        """
        with budgeted(Budget(variables, _ROUNDS * self._size * messages)):
            return template.render(variables)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _MISSING_METHODS and isinstance(obj, (str, bytes, int)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(count, int):
                    budget.spend(len(text) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MOST_BITS:
                raise TemplateLimit(f"a power of more than {MOST_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            budget.spend(percent_size(left, budget.weigh(right)))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        budget = current()
        if isinstance(obj, (Macro, BlockReference)):
            budget.spend(self._size)
        elif isinstance(obj, LoopContext):
            args = tuple(budget.rounds(each, self._size) for each in args)
        else:
            args = tuple(budget.listed(each) for each in args)
            _spend_on_call(budget, obj, args, options)
        return budget.made(super().call(context, obj, *args, **options))


def _spend_on_call(
    budget: Budget, function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Before a function is called, or a method of a string or a container."""
    given = budget.weigh((args, options))
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, (list, tuple)):
        budget.weigh(owner)
    if not isinstance(owner, (str, bytes)):
        return
    budget.spend(len(owner))
    if name == "replace" and len(args) > 1:
        budget.spend(owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        budget.spend(len(owner) * len(args[0]))
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.spend(max(args[0], 0))
    elif name in ("format", "format_map") and isinstance(owner, str):
        budget.spend(format_size(owner, given))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """With the options that transformers gives it; jinja's own filter escapes HTML."""
    widest = indent if isinstance(indent, int) else len(indent or "")
    widest = max(widest, *map(len, separators or ("", "")))
    if widest > _MOST_JSON_WIDTH:
        raise TemplateLimit(f"tojson with {widest} blanks, expected up to {_MOST_JSON_WIDTH}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return current().joined(encoder.iterencode(value))


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    """Jinja's filter, for text that is not escaped."""
    text, old, new = str(text), str(old), str(new)
    current().spend(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends what it is given, where it looks into that, and what it makes."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # behind a context or an environment

    @wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        budget = current()
        if name not in _SHALLOW_FILTERS:
            args = (*args[:first], *(budget.listed(each) for each in args[first:]))
            given = budget.weigh((args[first:], options))
            _spend_on_filter(budget, name, args[first:], options, given)
        return budget.made(function(*args, **options))

    return bounded


def _spend_on_filter(
    budget: Budget, name: str, args: tuple[Any, ...], options: dict[str, Any], given: int
) -> None:
    """For the filters that make more than they are given."""
    value, others = args[0] if args else "", (*args[1:], *options.values())
    if name in ("center", "indent", "round", "batch", "slice"):
        widths = [each for each in others if isinstance(each, int)]
        if any(abs(width) > MOST_WIDTH for width in widths):
            raise TemplateLimit(
                f"{name} by {max(widths, key=abs):.3g}, expected up to {MOST_WIDTH}"
            )
    if name == "indent":
        width = others[0] if others else 4
        wide = len(width) if isinstance(width, str) else max(4, abs(int(width)))
        budget.spend((str(value).count("\n") + 1) * wide)
    elif name == "join":
        budget.spend(
            len(value) * max((len(each) for each in others if isinstance(each, str)), default=0)
        )
    elif name == "sum":  # of lists: each addition copies
        budget.spend(given * len(value) // 64 if hasattr(value, "__len__") else 0)
    elif name == "format":
        budget.spend(percent_size(str(value), given))


def _weighing(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def weighing(*args: Any) -> Any:
        current().weigh(args)
        return test(*args)

    return weighing


def _weighed(value: Any) -> Any:
    current().weigh(value)
    return value
