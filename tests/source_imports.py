"""What the package's files import, read from their source."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dappr_llm"


def imports(path):
    """Modules a file of the package imports, inside functions too, but never those for type checking."""
    tree = ast.parse(path.read_text())
    for_typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = ("dappr_llm", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found
