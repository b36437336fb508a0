"""What a general mutation does to a module: one small change of its syntax tree.

`sites` lists the changes a module can take, in the order of its text; `mutated` makes one of them.
Texts of messages are left alone: what is raised, logged, hinted, or put together in an f-string.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
TEXTS = {"InvalidId", "Damage", "shown", "warning", "info", "_describe", "NewType", "TypeVar"}
"""Calls whose arguments are for people, or for type checkers."""

SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Change = Callable[[], ast.AST]


class Site(NamedTuple):
    """`number` in the module, first and last line, the function (the outermost; "" at module level)
    and what is done. `at_import`: what runs only as the module is imported: such a change needs a
    fresh import to be seen."""

    number: int
    lines: tuple[int, int]
    function: str
    what: str
    at_import: bool


def sites(source: str) -> list[Site]:
    tree = ast.parse(source)
    return [site for site, _, _, _ in _changes(tree)]


def mutated(source: str, number: int) -> ast.Module:
    """The module with that change; positions are kept."""
    tree = ast.parse(source)
    for site, parent, place, change in _changes(tree):
        if site.number == number:
            _put(parent, place, ast.copy_location(change(), _at(parent, place)))
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


Place = tuple[str, int | None]


def _changes(tree: ast.Module) -> Iterator[tuple[Site, ast.AST, Place, Change]]:
    number = 0
    for node, parent, place, function in _nodes(tree, ""):
        for what, change in _of(node, parent, at_import=not function.endswith("()")):
            first: int = getattr(node, "lineno", getattr(parent, "lineno", 0))
            last: int = getattr(node, "end_lineno", None) or first
            at_import = not function.endswith("()")
            site = Site(number, (first, last), function.removesuffix("()"), what, at_import)
            yield site, parent, place, change
            number += 1


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, ast.AST, Place, str]]:
    """The nodes that may change, with their place, and in which class or function: `name()` is
    what runs when the function is called."""
    for field, value in ast.iter_fields(node):
        inside = function
        if isinstance(node, SCOPES) and not function.endswith("()"):
            inside = f"{function}.{node.name}".lstrip(".")
            if field == "body" and not isinstance(node, ast.ClassDef):
                inside += "()"
        children = cast("list[object]", value if isinstance(value, list) else [value])
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_text(node, field, child):
                continue
            place = (field, index if isinstance(value, list) else None)
            yield child, node, place, inside
            yield from _nodes(child, inside)


def _is_text(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """Docstrings, types, messages: no change of them is of interest."""
    if isinstance(parent, ast.Raise) or field in ("annotation", "returns", "decorator_list"):
        return True
    if isinstance(parent, ast.ClassDef) and field in ("bases", "keywords"):
        return True
    match child:
        case ast.keyword(arg="hint" | "where" | "run_id" | "reason" | "message"):
            return True
        case ast.Constant():
            typed = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "cast"
            return typed or isinstance(parent, ast.JoinedStr | ast.Expr)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in TEXTS
        case ast.Assign(targets=[ast.Name(id="__slots__")]):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case _:
            return isinstance(child, ast.Import | ast.ImportFrom | ast.Assert)


def _of(node: ast.AST, parent: ast.AST, *, at_import: bool) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            new = COMPARED[type(op)]
            yield f"{_text(node)}: {new.__name__}", lambda: _with(node, ops=[new()])
        case ast.BoolOp(values=values):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield f"{_text(node)}: {other.__name__}", lambda: _with(node, op=other())
            for i, value in enumerate(values):
                rest = values[:i] + values[i + 1 :]
                yield (
                    f"{_text(node)}: without {_text(value)}",
                    lambda r=rest: _with(node, values=r) if len(r) > 1 else copy.deepcopy(r[0]),
                )
        case ast.UnaryOp(op=ast.Not()):
            yield f"{_text(node)}: not dropped", lambda: copy.deepcopy(node.operand)
        case ast.BinOp(op=ast.BitOr()) if at_import:  # of types
            return
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            new_op = COMPUTED[type(op)]
            yield f"{_text(node)}: {new_op.__name__}", lambda: _with(node, op=new_op())
        case ast.Name(id=name) if name in NAMES and isinstance(parent, ast.Call):
            yield f"{name}: {NAMES[name]}", lambda: _with(node, id=NAMES[name])
        case ast.Constant():
            yield from _of_constant(node, parent)
        case ast.If(test=test) | ast.IfExp(test=test):
            for value in (False, True):
                told = f"{'if' if isinstance(node, ast.If) else 'ifexp'} {_text(test)}: {value}"
                yield told, lambda v=value: _with(node, test=ast.Constant(v))
        case ast.comprehension(ifs=[_, *_]):
            for i, test in enumerate(node.ifs):
                rest = node.ifs[:i] + node.ifs[i + 1 :]
                yield f"filter {_text(test)}: dropped", lambda r=rest: _with(node, ifs=r)
        case ast.match_case(pattern=pattern) if node.guard is None and not _catches_all(node):
            told = f"case {_text(pattern)}: never"
            yield told, lambda: _with(node, guard=ast.Constant(False))
        case ast.match_case(guard=ast.expr()) if not _catches_all(node):
            yield f"case guard {_text(node.guard)}: dropped", lambda: _with(node, guard=None)
        case _:
            yield from _of_statement(node)


def _of_constant(node: ast.Constant, parent: ast.AST) -> Iterator[tuple[str, Change]]:
    match node.value:
        case bool():
            yield f"{node.value}: {not node.value}", lambda: ast.Constant(not node.value)
        case int() | float() as value:
            yield f"{value} in {_text(parent)}: +1", lambda: ast.Constant(value + 1)
        case str() if node.value:
            yield f"{node.value!r} in {_text(parent)}: ''", lambda: ast.Constant("")
        case str():
            yield f"'' in {_text(parent)}: 'XX'", lambda: ast.Constant("XX")
        case _:
            return


def _of_statement(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield()) | ast.Raise() | ast.Delete():
            pass
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            pass
        case ast.AugAssign() | ast.Continue() | ast.Break():
            pass
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            return  # an attribute's first value: without it nothing works
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield f"{_text(node)}: None", lambda: ast.Return(ast.Constant(None))
            return
        case _:
            return
    yield f"{_text(node)}: dropped", lambda: ast.Pass()


def _catches_all(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _at(parent: ast.AST, place: Place) -> ast.AST:
    field, index = place
    value = getattr(parent, field)
    return value if index is None else value[index]


def _put(parent: ast.AST, place: Place, node: ast.AST) -> None:
    field, index = place
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _text(node: ast.AST | None) -> str:
    text = " ".join(ast.unparse(node).split()) if node is not None else ""
    return text if len(text) <= 70 else f"{text[:69]}…"
