"""Mutations of the source of a pure rule, each of which a test of the rule must detect.

The mutations: a negated condition, an `and` for an `or`, an omitted part of a condition or a case,
another member of an enum.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Mutant", "build_mutants"]

_OPPOSITE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.GtE: ast.Lt,
    ast.Lt: ast.GtE,
}
_PARTS: Mapping[type[ast.AST], str] = {
    ast.BoolOp: "values",
    ast.Set: "elts",
    ast.MatchOr: "patterns",
    ast.Match: "cases",
}
_Change = tuple[str, Callable[[Any], None]]


@dataclass(frozen=True)
class Mutant:
    """One mutation: its position and kind, and the mutated function."""

    what: str
    function: Callable[..., Any]


def build_mutants(source: str, name: str, scope: Mapping[str, Any]) -> Iterator[Mutant]:
    """Yield the function `name` of a module once for each change to it, and to what it uses of the module.

    Args:
        source: the module's text.
        name: a function of the module.
        scope: the module's own names; its classes are used as they are.
    """
    module = ast.parse(source)
    kept = [node for node in module.body if isinstance(node, ast.FunctionDef) or _is_constant(node)]
    tree = ast.Module(body=_reached_from(name, kept), type_ignores=[])
    for position, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node, scope):
            copy = deepcopy(tree)
            target = next(found for number, found in enumerate(ast.walk(copy)) if number == position)
            change(target)
            names = dict(scope)
            exec(compile(ast.fix_missing_locations(copy), name, "exec"), names)
            yield Mutant(f"line {getattr(node, 'lineno', '?')}: {what}", names[name])


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "__all__"


def _changes(node: ast.AST, scope: Mapping[str, Any]) -> Iterator[_Change]:
    yield from _reversals(node)
    yield from _omissions(node)
    yield from _exchanges(node, scope)


def _reversals(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.If | ast.IfExp):
        yield "the other way round", _negate
    if isinstance(node, ast.BoolOp):
        yield "and for or", _swap_operator
    if isinstance(node, ast.Compare):
        yield "the opposite comparison", _swap_comparison
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", _without_not


def _omissions(node: ast.AST) -> Iterator[_Change]:
    field = _PARTS.get(type(node))
    parts = getattr(node, field) if field else []
    if len(parts) > 1:
        for number in range(len(parts)):
            yield f"without part {number + 1}", _without(field or "", number)


def _exchanges(node: ast.AST, scope: Mapping[str, Any]) -> Iterator[_Change]:
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return
    enum = scope.get(node.value.id)
    if isinstance(enum, type) and issubclass(enum, Enum) and node.attr in enum.__members__:
        for other in enum.__members__:
            if other != node.attr:
                yield f"{enum.__name__}.{other} for {enum.__name__}.{node.attr}", _with_member(other)


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _swap_operator(node: Any) -> None:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _swap_comparison(node: Any) -> None:
    node.ops = [_OPPOSITE[type(op)]() for op in node.ops]


def _without_not(node: Any) -> None:
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _without(field: str, number: int) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        rest = [part for at, part in enumerate(getattr(node, field)) if at != number]
        # An operator must have two parts; the same twice is one.
        setattr(node, field, rest if len(rest) > 1 else rest * 2)

    return change


def _with_member(other: str) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        node.attr = other

    return change


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)}


def _reached_from(name: str, nodes: list[ast.stmt]) -> list[ast.stmt]:
    """Return those of the functions and constants that the function `name` uses, itself included."""
    reached, names = set[int](), {name}
    while found := [number for number, node in enumerate(nodes) if number not in reached and names & _names_of(node)]:
        reached.update(found)
        for number in found:
            names |= {each.id for each in ast.walk(nodes[number]) if isinstance(each, ast.Name)}
    return [node for number, node in enumerate(nodes) if number in reached]
