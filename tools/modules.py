"""`python -m tools.modules [FOLDER]`: print every module of the product, or of a folder, with its responsibility."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_PACKAGES: Final = ("core", "exposer", "nodeagent", "client", "datamover")


def list_modules() -> Iterator[Path]:
    """Yield the files of all modules, folder by folder."""
    for package in _PACKAGES:
        yield from sorted((_ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.stem))


def read_responsibility(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".")


def _print(folder: str) -> None:
    for path in list_modules():
        name = path.relative_to(_ROOT)
        if not name.is_relative_to(folder):
            continue
        if path.stem == "__init__":
            print(f"\n{name.parent}/: {read_responsibility(path)}")
        else:
            print(f"  {path.stem:<26} {read_responsibility(path)}")


if __name__ == "__main__":
    _print(sys.argv[1] if len(sys.argv) > 1 else "")
