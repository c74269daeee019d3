"""Check what linters do not: no public class name twice, no room longer than the committed table allows, few private names.

``python tests/house_rules.py`` prints the lines of each room and fails if a rule is broken; ``--write`` writes the table, so
that a room that grew shows as a changed line of ``tests/room_sizes.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TABLE = Path(__file__).with_name("room_sizes.json")
_PRODUCT = ("probe/zerotop_probe", "tui/zerotop")
_STEP = 25  # sizes in the table are multiples of this
# Private functions and attributes of the product that tests may use: to call what a thread would call, to plant a fault, or
# to compare state that nothing else shows. Constants do not count: tests shorten waits and sizes with them.
_MOST_PRIVATE_USES = 60


def list_modules(folder: str) -> list[Path]:
    """Return the modules below a folder."""
    return sorted((_ROOT / folder).rglob("*.py"))


def count_lines() -> dict[str, int]:
    """Return the lines of each room: a folder of the product up to two levels down, or of the tests."""
    sizes: dict[str, int] = defaultdict(int)
    for part in (*_PRODUCT, "tests"):
        for path in list_modules(part):
            room = path.parent.relative_to(_ROOT / part).parts[: 1 if part == "tests" else 2]
            sizes["/".join((part, *room))] += len(path.read_bytes().splitlines())
    return dict(sorted(sizes.items()))


def find_shared_names() -> list[str]:
    """Return a sentence for each public class name that the product has more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for part in _PRODUCT for path in list_modules(part)):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(_ROOT)}:{node.lineno}")
    return [f"Two classes are called {name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def list_private_uses() -> list[str]:
    """Return where tests use private functions and attributes of the product."""
    product = [node for part in _PRODUCT for path in list_modules(part) for node in ast.walk(ast.parse(path.read_bytes()))]
    defined = {node.name for node in product if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    defined |= {node.attr for node in product if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    private = {name for name in defined if name.startswith("_") and not name.endswith("_") and not name[1:].isupper()}
    private -= {"_replace"}  # of named tuples
    return [
        f"{path.relative_to(_ROOT)}:{node.lineno}: {name}"
        for path in list_modules("tests")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, (ast.expr, ast.ImportFrom))
        for name in _list_names(node)
        if name in private
    ]


def _list_names(node: ast.AST) -> list[str]:
    """Return the names that a node takes from another object: by a dot, an import, or monkeypatch.setattr."""
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if is_own else [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
        return [str(one.value).rpartition(".")[2] for one in node.args[:2] if isinstance(one, ast.Constant)]
    return []


def main() -> int:
    """Print the sizes, then the broken rules; return their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of sizes")
    parser.add_argument("--quiet", action="store_true", help="print broken rules only")
    options = parser.parse_args()
    sizes = count_lines()
    if options.write:
        limits = {room: -(-lines // _STEP) * _STEP for room, lines in sizes.items()}
        _TABLE.write_text(json.dumps(limits, indent=1) + "\n")
    limits = json.loads(_TABLE.read_text())
    if not options.quiet:
        print("\n".join(f"{lines:7,} of {limits.get(room, 0):6,}  {room}" for room, lines in sizes.items()))
        product = sum(lines for room, lines in sizes.items() if room.startswith(_PRODUCT))
        print(f"{product:7,} lines of product, {sum(sizes.values()) - product:,} of tests")
    broken = find_shared_names()
    for room, lines in sizes.items():
        if lines > limits.get(room, 0):
            limit = f"the table allows {limits[room]:,}" if room in limits else "the table lacks it"
            broken.append(
                f"{room} has {lines:,} lines, {limit}: shorten it, or raise the number in {_TABLE.name} with a reason"
            )
    if len(private := list_private_uses()) > _MOST_PRIVATE_USES:
        broken += [*private, f"Tests use private names {len(private)} times, at most {_MOST_PRIVATE_USES} are allowed."]
    print(*broken, sep="\n", end="\n" if broken else "")
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
