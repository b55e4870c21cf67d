"""`make house`: print how large the product is, and how much a reader must know of it; the last line is JSON.

Production is every Python module in git outside of tests, benchmarks and tools.
"""

import ast
import asyncio
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from tests.nodeagent.support.harness import accepted, build_agent, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, data_upload

_ROOT: Final = Path(__file__).parents[1]
_OTHERS: Final = {"tests", "benchmarks", "tools"}
_GENERATED: Final = {"docs/configuration-keys.md", "docs/metrics.md", "docs/permissions.md"}
_SMALL_LINES: Final = 100
_NO_CODE: Final = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def measure() -> dict[str, int]:
    """Return the measures by name; the lists behind some of them go to standard error."""
    texts = _read("*.py")
    product = {path: text for path, text in texts.items() if path.partition("/")[0] not in _OTHERS}
    trees = {path: ast.parse(text) for path, text in product.items()}
    modules = [path for path in product if not path.endswith("__init__.py")]
    small = {path: importer for path, importer in _single_importers(trees) if _count(product[path]) < _SMALL_LINES}
    near = [path for path, importer in small.items() if Path(path).parent == Path(importer).parent]
    twice = sorted(name for name, number in Counter(_public_classes(trees)).items() if number > 1)
    step = sorted(asyncio.run(_run_expose_step()) & product.keys())
    for title, names in (("imported once", small), ("classes of one name", twice), ("modules of a step", step)):
        print(f"{title}: {', '.join(names)}", file=sys.stderr)
    return {
        "productionLines": sum(map(_count, product.values())),
        "productionCodeLines": sum(_count_code(text, trees[path]) for path, text in product.items()),
        "modules": len(modules),
        "smallModulesWithOneImporter": len(small),
        "smallModulesWithOneImporterInTheirFolder": len(near),
        "modulesOfOneExposeStep": len([path for path in step if not path.startswith("core/")]),
        "publicClassNamesThatExistTwice": len(twice),
        "jsonDictMentions": sum(len(re.findall(r"\bJsonDict\b", text)) for text in product.values()),
        "testLines": sum(_count(text) for path, text in texts.items() if path.startswith("tests/")),
        "benchmarkLines": sum(_count(text) for path, text in texts.items() if path.startswith("benchmarks/")),
        "wordsOfPages": sum(len(text.split()) for path, text in _read("*.md").items() if path not in _GENERATED),
    }


def _read(pattern: str) -> dict[str, str]:
    """Return the text of each file in git by its path, unless it was deleted meanwhile."""
    argv = ["git", "-C", str(_ROOT), "ls-files", pattern]
    listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()  # noqa: S603 - ours
    return {path: (_ROOT / path).read_text(encoding="utf-8") for path in listed if (_ROOT / path).exists()}


def _count(text: str) -> int:
    return len(text.splitlines())


def _count_code(text: str, tree: ast.Module) -> int:
    """Return the number of lines that are not blank, comment or docstring (an attribute's included)."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def _public_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    for tree in trees.values():
        yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def _single_importers(trees: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """Return each module that one module alone imports, and that one."""
    paths = {path.removesuffix(".py").replace("/", "."): path for path in trees}
    importers: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _imported(tree):
            if name in paths:
                importers.setdefault(paths[name], set()).add(path)
    return sorted((path, next(iter(found))) for path, found in importers.items() if len(found) == 1)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


async def _run_expose_step() -> set[str]:
    """Let an agent take the step that creates the pod of a DataUpload; return the files whose functions it called."""
    called, own = set[str](), asyncio.current_task()

    def note(frame: FrameType, *_: object) -> None:
        if asyncio.current_task() is own:
            called.add(frame.f_code.co_filename.removeprefix(f"{_ROOT}/"))

    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(starts=False)) as world:
        agent = build_agent(world.kube)
        cache = asyncio.create_task(agent._cache.run())  # noqa: SLF001 - one step, without the queue around it
        await agent._cache.wait_synced()  # noqa: SLF001 - as above
        while not world.left().get("pods"):
            # In the step before, the snapshot was not ready.
            await asyncio.sleep(world.cluster.tick_seconds)
            called.clear()
            sys.settrace(note)
            await agent._reconcile((transfer["kind"], NAMESPACE, transfer["metadata"]["name"]))  # noqa: SLF001 - as above
            sys.settrace(None)
        cache.cancel()
    return called


def main() -> int:
    """Print the measures as a table and as JSON."""
    found = measure()
    for name, number in found.items():
        print(f"{re.sub('([A-Z])', lambda match: f' {match[1].lower()}', name):<48} {number:>8,}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
