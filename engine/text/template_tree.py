"""Changes a chat template's syntax tree to count its operations while it runs: see `template_bounds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from .template_bounds import called, combined, filtered, joined, made, sliced, turned, weighed, written

# Tests with a cost independent of a value's size.
_CHEAP_TESTS = frozenset({
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true", "false",
    "integer", "float", "callable", "sameas", "filter", "test", "odd", "even", "divisibleby",
})  # fmt: skip


def count_operations(template: nodes.Template) -> nodes.Template:
    """Change `template` in place to charge the budget of `bounded`. It can be rendered only in that context."""
    changed: nodes.Template = _Counting().visit(template)
    return changed


def _call(
    function: Callable[..., Any], arguments: list[nodes.Expr], like: nodes.Call | nodes.Filter | None = None
) -> nodes.Call:
    """A call of a function of `template_bounds`. `like` gives further arguments."""
    name = nodes.ImportedName(f"{function.__module__}.{function.__name__}")
    if like is None:
        return nodes.Call(name, arguments, [], None, None)
    return nodes.Call(name, [*arguments, *like.args], like.kwargs, like.dyn_args, like.dyn_kwargs)


class _Counting(NodeTransformer):
    """Replaces operations by calls of the functions of `template_bounds`. Inner nodes are changed before outer ones."""

    def __init__(self) -> None:
        self._blocks = 0  # number of captured blocks, for unique variable names

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call(turned, [])), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call(turned, []), node.test)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        return _call(called, [nodes.ContextReference(), node.node], node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        assert node.node is not None  # for filters of blocks, `_captured` has set it
        return _call(filtered, [nodes.ContextReference(), nodes.Const(node.name), node.node], node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> list[nodes.Node]:
        """`{% filter f %}...{% endfilter %}` becomes `{% set v %}...{% endset %}{{ v | f }}`."""
        name = self._captured(node.filter)
        block = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body)
        return [self.visit(block), self.visit(nodes.Output([node.filter]))]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node | list[nodes.Node]:
        if node.filter is None:
            return self.generic_visit(node)
        name = self._captured(node.filter)
        block = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body)
        return [self.visit(block), self.visit(nodes.Assign(node.target, node.filter))]

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_call(written, [child]) for child in node.nodes]
        return node

    def visit_Add(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _call(combined, [nodes.Const(node.operator), node.left, node.right])

    visit_Mul = visit_Pow = visit_Mod = visit_Add

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(joined, [nodes.ContextReference(), *node.nodes])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            parts = [nodes.Const(None) if part is None else part for part in (node.arg.start, node.arg.stop, node.arg.step)]
            return _call(sliced, [nodes.ContextReference(), node.node, *parts])
        if not isinstance(node.arg, nodes.Const):
            node.arg = _call(weighed, [node.arg])
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if not searches and any(isinstance(side, nodes.Const) for side in sides):
            return self.generic_visit(node)  # the constant's length bounds the cost
        node.expr = self._to_be_looked_at(node.expr)
        for operand in node.ops:
            operand.expr = self._to_be_looked_at(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name in _CHEAP_TESTS:
            return self.generic_visit(node)
        node.node = self._to_be_looked_at(node.node)
        node.args = [self._to_be_looked_at(argument) for argument in node.args]
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call(made, [node])

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def _to_be_looked_at(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const) or _is_list_of_constants(node):
            return node
        return _call(weighed, [self.visit(node)])

    def _captured(self, outer: nodes.Filter) -> str:
        """Make the innermost filter of a chain take a new variable instead of a block. Returns the variable's name."""
        self._blocks += 1
        name = f"_captured_block_{self._blocks}"
        while isinstance(outer.node, nodes.Filter):
            outer = outer.node
        outer.node = nodes.Name(name, "load")
        return name


def _is_list_of_constants(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)
