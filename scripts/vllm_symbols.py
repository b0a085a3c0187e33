"""Compare what this project uses of vLLM between two versions.

Run ``python -m scripts.vllm_symbols OLD NEW`` with two wheels, or with two folders that contain the package ``vllm``.
Compared are, as syntax trees without docstrings and comments:

- what the project's modules import from vLLM, and the attributes that they name of it, also as strings;
- the methods and attributes of vLLM's own objects that are known by the names of :data:`OBJECTS`;
- what the project's subclasses of vLLM's classes, and the classes of :data:`STAND_INS`, define or use of themselves.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from scripts.repository import ROOT, tracked_files

OBJECTS = {
    "input_batch": ["vllm.v1.worker.gpu.input_batch.InputBatch", "vllm.v1.worker.gpu_input_batch.InputBatch"],
    "lora_state": ["vllm.v1.worker.gpu.lora_utils.LoraState"],
    "model_runner": [
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    ],
    "renderer": ["vllm.renderers.base.BaseRenderer"],
    "req_states": ["vllm.v1.worker.gpu.states.RequestState"],
    "scheduler_output": ["vllm.v1.core.sched.output.SchedulerOutput"],
    "worker": ["vllm.v1.worker.gpu_worker.Worker"],
    "llm": ["vllm.v1.engine.async_llm.AsyncLLM"],
}
"""Names of variables and attributes, without leading underscores, and the classes of vLLM that the objects have."""
OBJECTS["runner"] = OBJECTS["model_runner"]
STAND_INS = {
    "EngineExtension": OBJECTS["worker"],
    "DraftingExtension": OBJECTS["worker"],
    "ExactVerification": ["vllm.v1.worker.gpu.spec_decode.adaptive_verification.AdaptiveVerificationManager"],
}
"""Classes of this project that take the place of, or are mixed into, a class of vLLM."""
STATES = ("missing", "other signature", "other body", "new", "equal")


class Package:
    """The modules of one version of vLLM."""

    def __init__(self, path: Path) -> None:
        self._root = zipfile.Path(path) if path.is_file() else path
        self.module = cache(self._module)
        self.find = cache(self._find)

    def _module(self, name: str) -> ast.Module | None:
        parts = name.split(".")
        for file in (f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"):
            if (path := self._root / file).is_file():
                return _without_docstrings(ast.parse(path.read_text(encoding="utf-8")))
        return None

    def _find(self, symbol: str) -> ast.AST | None:
        """Return the definition of a module, or of what a module or class contains; None if there is none."""
        if (module := self.module(symbol)) is not None:
            return module
        owner_name, _, name = symbol.rpartition(".")
        owner = self.find(owner_name) if owner_name else None
        if isinstance(owner, ast.ClassDef):
            return self._member(owner, name)
        if not isinstance(owner, ast.Module):
            return None
        home = owner_name if self.module(f"{owner_name}.__init__") is None else f"{owner_name}.__init__"
        found: ast.AST | None = None
        for node in _definitions(owner.body, name):
            found = node
            if (target := _imported(node, home).get(name, symbol)) != symbol:
                found = self.find(target) or node
            if isinstance(found, ast.ClassDef) and not hasattr(found, "home"):
                found.home = home
        # Packages of vLLM that import lazily name the source of what they export, such as ".engine.llm:LLM".
        for node in ast.walk(owner) if found is None else ():
            if isinstance(node, ast.Constant) and str(node.value).endswith(f":{name}"):
                return self.find(owner_name + str(node.value).replace(":", "."))
        return found

    def _member(self, owner: ast.ClassDef, name: str) -> ast.AST | None:
        """Return what a class or its bases define, or else the first value of an attribute."""
        for node in _definitions(owner.body, name):
            return node
        for node in ast.walk(owner):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(ast.unparse(one) == f"self.{name}" for one in targets if isinstance(one, ast.Attribute)):
                return node
        for base in owner.bases:
            found = self.find(f"{owner.home.removesuffix('.__init__')}.{ast.unparse(base)}")
            if isinstance(found, ast.ClassDef) and (member := self._member(found, name)) is not None:
                return member
        return None


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    return tree


def _definitions(body: Iterable[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a class, also conditional ones, that define a name."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name for alias in node.names]
            case ast.Assign():
                names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            case ast.AnnAssign():
                names = [ast.unparse(node.target)]
            case _:
                names = []
                for part in ("body", "orelse", "handlers", "finalbody"):
                    yield from _definitions(getattr(node, part, []), name)
        if name in names:
            yield node


def _imported(node: ast.AST, module: str) -> dict[str, str]:
    """Return the names that a statement in *module* imports, and what they stand for; nothing for other nodes."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name: alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return {}
    package = ".".join(module.split(".")[: -node.level]) if node.level else ""
    source = ".".join(filter(None, (package, node.module)))
    return {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}


def used_symbols(sources: Mapping[str, str], old: Package) -> dict[str, set[str]]:
    """Return the symbols of vLLM that modules use, and the modules that use each of them.

    Args:
        sources: path → text of each module.
        old: the version that the modules were written for. What it does not define counts only if it is imported.
    """
    symbols: dict[str, set[str]] = defaultdict(set)
    for path, text in sources.items():
        tree = ast.parse(text)
        imports = [
            pair for node in ast.walk(tree) for pair in _imported(node, "").items() if pair[1].startswith("vllm.")
        ]
        attributes = {symbol for symbol in _attributes(tree, dict(imports)) if old.find(symbol) is not None}
        for symbol in attributes.union(symbol for _, symbol in imports):
            symbols[symbol].add(path)
    return symbols


def _attributes(tree: ast.Module, names: Mapping[str, str]) -> Iterator[str]:
    """Yield what may be attributes of vLLM's modules, classes and objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            owners = [names[owner]] if owner in names else OBJECTS.get(owner.rpartition(".")[2].lstrip("_"), [])
            yield from (f"{one}.{node.attr}" for one in owners)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = list(ast.walk(node))
            used = {names[one.id] for one in inner if isinstance(one, ast.Name) and one.id in names}
            words = {one.value for one in inner if isinstance(one, ast.Constant) and str(one.value).isidentifier()}
            yield from (f"{one}.{word}" for one in used for word in words)
        elif isinstance(node, ast.ClassDef):
            bases = [names[base] for base in map(ast.unparse, node.bases) if base in names]
            for owner in bases + STAND_INS.get(node.name, []):
                for inner_node in ast.walk(node):
                    if isinstance(inner_node, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield f"{owner}.{inner_node.name}"
                    elif isinstance(inner_node, ast.Attribute) and ast.unparse(inner_node.value) == "self":
                        yield f"{owner}.{inner_node.attr}"


def compare(symbol: str, old: Package, new: Package) -> str:
    """Return one of :data:`STATES`."""
    before, after = old.find(symbol), new.find(symbol)
    if after is None:
        return "missing"
    if before is None:
        return "new"
    if _signature(before) != _signature(after):
        return "other signature"
    return "equal" if ast.dump(before) == ast.dump(after) else "other body"


def _signature(node: ast.AST) -> str:
    """Return what callers of a function or a class see: parameters, result, decorators, bases and annotated fields."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returns = node.returns and ast.unparse(node.returns)
            return f"{type(node)} {ast.unparse(node.args)} {returns} {[*map(ast.unparse, node.decorator_list)]}"
        case ast.ClassDef():
            fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
            return "\n".join(
                [*map(ast.unparse, node.bases), *fields, *map(_signature, _definitions(node.body, "__init__"))]
            )
        case _:
            return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="wheel, or folder with the package vllm, of the version in use")
    parser.add_argument("new", type=Path, help="the same of another version")
    arguments = parser.parse_args()
    old, new = Package(arguments.old), Package(arguments.new)
    sources = {path: (ROOT / path).read_text() for path in tracked_files("*.py")}
    by_state: dict[str, list[str]] = defaultdict(list)
    for symbol, paths in sorted(used_symbols(sources, old).items()):
        by_state[compare(symbol, old, new)].append(f"  {symbol}  ({', '.join(sorted(paths))})")
    for state in STATES:
        print(f"{state}: {len(by_state[state])}", *by_state[state], sep="\n")


if __name__ == "__main__":
    main()
