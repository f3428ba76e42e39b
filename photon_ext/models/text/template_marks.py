"""Marks in a template's syntax tree.

Filters that make spend what neither operators, calls nor filters see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2.visitor import NodeTransformer

from photon_ext.models.text.template_budget import current


def mark(tree: nodes.Template, environment: Environment) -> None:
    """Adds the marks to `tree`, and what they do to `environment`.

    They are filters with a blank in front: a template can neither name nor replace them. They take
    the context, so that nothing is computed while the template compiles.
    """
    environment.filters.update({" made": _made, " weighed": _weighed, " rounds": _rounds})
    _Marks().visit(tree)
    tree.set_environment(environment)


def tree_size(tree: nodes.Node) -> int:
    """Nodes and characters of text."""
    pending, size = [tree], 0
    while pending:
        node = pending.pop()
        size += 1 + (len(node.data) if isinstance(node, nodes.TemplateData) else 0)
        pending.extend(node.iter_child_nodes())
    return size


@pass_context
def _made(context: Any, value: Any) -> Any:
    return current().made(value)


@pass_context
def _weighed(context: Any, value: Any) -> Any:
    current().weigh(value)
    return value


@pass_context
def _rounds(context: Any, values: Iterable[Any], size: int) -> Iterator[Any]:
    return current().rounds(values, size)


def _marked(node: Any, name: str, *args: nodes.Expr) -> Any:
    if _is_literal(node):
        return node
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_literal(node: nodes.Node) -> bool:
    """Whether it is as large as it is written."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_literal, node.items))
    return isinstance(node, nodes.Const)


class _Marks(NodeTransformer):
    """Marks the parts of a template that neither operators, calls nor filters see."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = tree_size(node)
        self.generic_visit(node)
        node.iter = _marked(node.iter, " rounds", nodes.Const(size))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_marked(each, " weighed") for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _marked(node.expr, " weighed")
        for operand in node.ops:
            operand.expr = _marked(operand.expr, " weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _marked(node, " made")  # type: ignore[no-any-return]
        node.arg = _marked(node.arg, " weighed")
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _marked(pair.key, " weighed")
        return _marked(node, " made")  # type: ignore[no-any-return]

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _marked(node, " made")  # type: ignore[no-any-return]

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _marked(node, " made") if node.ctx == "load" else node
