"""The mutants: cosmic-ray's operators and the removal of a statement, at every place of the package outside kernels."""

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Keyword
from parso.tree import NodeOrLeaf

FOLDERS = ("passes", "ple_compile")
_KERNEL = ("triton.jit", "triton.constexpr_function")
_NEVER_CHANGED = ("name", "string", "newline", "endmarker")
_NEED_ARGUMENTS = ("VariableInserter", "VariableReplacer")


@dataclass(frozen=True)
class Mutant:
    """`operator`'s change at its `occurrence`-th place in `file`; `lines` are those of the statement around it."""

    file: str
    line: int
    operator: str
    occurrence: int
    lines: tuple[int, int]
    in_function: bool

    def code(self, root: Path) -> str:
        return mutate_code((root / self.file).read_text(), _OPERATORS[self.operator](), self.occurrence)

    def change(self, root: Path) -> tuple[str, str]:
        """The lines that it changes, before and after."""
        before, after = (root / self.file).read_text().splitlines(), self.code(root).splitlines()
        diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
        return tuple("\n".join(line[1:].strip() for line in diff if line[0] == sign) for sign in "-+")


class RemoveStatement(Operator):
    """A simple statement inside a function becomes `pass`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and node.children[0].type not in ("string", "strings", "keyword"):
            if node.search_ancestor("funcdef") is not None:
                yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.children[0] = Keyword("pass", node.start_pos, prefix=node.children[0].get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple:
        return ()


_OPERATORS = {name.split("/")[1]: get_operator(name) for name in operator_names() if not name.endswith(_NEED_ARGUMENTS)}
_OPERATORS["RemoveStatement"] = RemoveStatement


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` places drawn at random, and for each one of the changes that its operators offer there."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    places = [place for file in files for place in places_of(root, file.relative_to(root).as_posix())]
    draw = random.Random(seed)
    mutants: list[Mutant] = []
    for place in draw.sample(places, len(places)):
        mutant = draw.choice(place)
        if len(mutants) < count and _compiles(mutant.code(root)):
            mutants.append(mutant)
    return mutants


def places_of(root: Path, file: str) -> list[list[Mutant]]:
    """The mutants of a file, those of one place together."""
    source = (root / file).read_text()
    tree = ast.parse(source)
    skipped, statements = list(_skipped(tree)), list(_statements(tree))
    places = defaultdict(list)
    nodes = [node for node in ast_nodes(get_ast(source)) if node.type not in _NEVER_CHANGED]
    for name, operator in _OPERATORS.items():
        positions = [position for node in nodes for position in operator().mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            if any(first <= start < last for first, last in skipped):
                continue
            # An `except` line belongs to no statement: it stands for itself.
            alone = ((start[0], start[0]), any(body for lines, body in statements if lines[0] == start[0] + 1))
            lines, in_function = max((s for s in statements if s[0][0] <= start[0] <= s[0][1]), default=alone)
            places[start, end].append(Mutant(file, start[0], name, occurrence, lines, in_function))
    return [places[position] for position in sorted(places)]


def _skipped(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Kernels and annotations."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            extra = [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
            parts = [node.returns, *(argument.annotation for argument in [*arguments, *extra])]
            if any(ast.unparse(decorator).startswith(_KERNEL) for decorator in node.decorator_list):
                yield (node.decorator_list[0].lineno, 0), (node.end_lineno, node.end_col_offset)
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        for part in parts:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _statements(tree: ast.Module) -> Iterator[tuple[tuple[int, int], bool]]:
    """The lines of each statement, without the body of a compound one, and whether it is inside a function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {child for function in functions for part in function.body for child in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
            yield (first, max(first, last)), node in inside


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True
