"""Every message that the package raises or warns with, read from its sources as a template.

python -m tests.messages        the rows that docs/errors.md lacks, to be completed there
"""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted({*(ROOT / "ple_compile").rglob("*.py"), *(ROOT / "passes").rglob("*.py")})
CATALOGUE = ROOT / "docs" / "errors.md"

# Reasons that `explain` shows, errors of this package itself, and methods that a subclass must have.
NOT_FOR_USERS = {"Declined", "Unprobeable", "AssertionError", "KeyError", "NotImplementedError"}
WARNINGS = ("log.warning", "log.error", "warnings.warn")


def messages() -> dict[str, str]:
    """Templates, with `…` for what is filled in, and where each is raised (file:line)."""
    trees = {file: ast.parse(file.read_text()) for file in SOURCES}
    functions = {n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    found: dict[str, str] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            for message in _message_of(node):
                for text in _templates(message, functions):
                    found.setdefault(" ".join(text.split()), f"{file.relative_to(ROOT)}:{message.lineno}")
    return found


def documented() -> list[str]:
    """The first cell of every row in docs/errors.md, without its quotes."""
    rows = [line.split(" | ") for line in CATALOGUE.read_text().splitlines() if line.startswith("| `")]
    return [cells[0].removeprefix("| ").strip("`") for cells in rows if all(cell.strip(" |") for cell in cells[1:3])]


def _message_of(node: ast.AST) -> Iterator[ast.expr]:
    """The message of a `raise SomeError(message)`, a `log.warning(message, ...)` or a `warnings.warn(message)`."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        if ast.unparse(node.exc.func).rpartition(".")[2] not in NOT_FOR_USERS:
            yield node.exc.args[0]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in WARNINGS:
        yield node.args[0]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "log.log":  # a level that may be a warning's
        yield node.args[1]


def _templates(message: ast.expr, functions: dict[str, ast.FunctionDef]) -> list[str]:
    """The templates of a message that is written where it is raised, or returned by a function of the package."""
    match message:
        case ast.Constant(value=str(text)):
            for placeholder in ("%s", "%d", "%.1f"):
                text = text.replace(placeholder, "…")
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)]
        case ast.BinOp(left=left, op=ast.Add()):
            return [text + "…" for text in _templates(left, functions)]
        case ast.Call(func=ast.Name(id=name)):
            returned = [n.value for n in ast.walk(functions[name]) if isinstance(n, ast.Return) and n.value]
            return [text for value in returned for text in _templates(value, functions)]
        case _:
            raise AssertionError(f"line {message.lineno}: write the message where it is raised: {ast.unparse(message)}")


if __name__ == "__main__":
    for template, place in messages().items():
        if template not in documented():
            print(f"| `{template}` |  |  |    {place}")
