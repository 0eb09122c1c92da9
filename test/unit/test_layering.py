"""Imports point one way, and only the outer packages know SGLang.

engine, serving, cli, sim -> tiers -> cache -> pool        adapters -> pool        kernels: alone

Nothing imports lang: it is for programs of users.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"sglang_graft": ROOT / "python", "graft_kernels": ROOT / "kernels"}

_CORE = {"pool", "adapters", "cache", "tiers"}

# What each package may import of sglang_graft besides itself. A module directly below sglang_graft
# (the option table) stands here like a package; the names of its __init__ are free to all.
ALLOWED: dict[str, set[str]] = {
    "pool": set(),
    "adapters": {"pool"},
    "cache": {"pool"},
    "tiers": {"pool", "adapters", "cache"},
    "sim": _CORE | {"config"},
    "tenants": set(),
    "bench": _CORE | {"config", "sim"},
    "engine": _CORE | {"config", "serving", "tenants"},
    "serving": _CORE | {"config", "engine", "tenants"},
    "cli": _CORE | {"config", "engine", "serving", "sim", "tenants", "bench"},
    "lang": {"engine"},
    "config": set(),
    "__init__": set(),
}
KNOWS_SGLANG = {"engine", "serving", "cli", "lang"}
# The tree handles page numbers and token bytes, never tensors. Adapter files are read without PEFT.
FORBIDDEN: dict[str, set[str]] = {"cache": {"torch"}, "adapters": {"peft", "transformers"}}


def imported(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions and TYPE_CHECKING."""
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = parts[: len(parts) - up] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def package_of(name: str) -> str:
    """`sglang_graft.cache.tree` -> `cache`; `sglang_graft` or a plain name in it -> `__init__`."""
    below = [*name.split("."), "__init__"][1]
    return below if below in ALLOWED else "__init__"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    found = []
    for line, name in imported(ast.parse(source), module, is_package=is_package):
        reason = refusal(module, name)
        if reason:
            found.append(f"{module}:{line} imports {name}: {reason}")
    return found


def refusal(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None if it may."""
    top, here = name.split(".")[0], package_of(module)
    if module.split(".")[0] == "graft_kernels":
        return "kernels import nothing of ours" if top in ("sglang", "sglang_graft") else None
    if top == "sglang" and here not in KNOWS_SGLANG:
        return f"only {sorted(KNOWS_SGLANG)} may import sglang"
    if top in FORBIDDEN.get(here, set()):
        return f"{here}/ does without {top}"
    if top == "sglang_graft" and package_of(name) not in ALLOWED[here] | {here, "__init__"}:
        return f"{here}/ may import only {sorted(ALLOWED[here])}"
    return None


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in SOURCES.items():
        for path in sorted((folder / package).rglob("*.py")):
            dotted = path.relative_to(folder).with_suffix("").parts
            found.append((".".join(dotted).removesuffix(".__init__"), path))
    return found


@pytest.mark.parametrize(
    ("module", "path"), [pytest.param(module, path, id=module) for module, path in modules()]
)
def test_imports_point_downwards(module: str, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert violations(source, module, is_package=path.name == "__init__.py") == []


def test_every_package_has_its_place() -> None:
    folder = SOURCES["sglang_graft"] / "sglang_graft"
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py"}
    names |= {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert names <= set(ALLOWED), "add the new package to ALLOWED with what it may import"
    assert {"sglang_graft.pool.ledger", "graft_kernels.sgmv.api"} <= {name for name, _ in modules()}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_graft.pool.ledger", "from sglang_graft.cache.tree import UnifiedTree"),
        ("sglang_graft.pool.ledger", "import sglang"),
        ("sglang_graft.pool.ledger", "import sglang_graft.config"),
        ("sglang_graft.pool.ledger", "from sglang_graft import cache"),
        ("sglang_graft.pool.ledger", "from ..cache import tree"),
        ("sglang_graft.pool.ledger", "from .. import cache"),
        ("sglang_graft.pool.ledger", "def f():\n    from sglang_graft.engine import hooks"),
        ("sglang_graft.adapters.read", "if TYPE_CHECKING:\n    from sglang_graft.cache import x"),
        ("sglang_graft.adapters.read", "import peft"),
        ("sglang_graft.cache.tree", "from sglang_graft.adapters import read"),
        ("sglang_graft.cache.tree", "import torch"),
        ("sglang_graft.tiers.host", "from sglang_graft.engine import hooks"),
        ("sglang_graft.tiers.host", "from sglang.srt import utils"),
        ("sglang_graft.sim.replay", "import sglang.srt.utils as u"),
        ("sglang_graft.engine.bind", "from sglang_graft import lang"),
        ("sglang_graft.cli.app", "import sglang_graft.lang"),
        ("sglang_graft.lang.choice", "from sglang_graft.serving import names"),
        ("graft_kernels.sgmv.api", "from sglang_graft.pool import Arena"),
        ("graft_kernels.sgmv.api", "import sglang"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_graft.pool.arena", "from sglang_graft.pool.layout import PageLayout"),
        ("sglang_graft.pool.arena", "from . import layout\nfrom .layout import PageLayout"),
        ("sglang_graft.cache.tree", "from sglang_graft.pool.ledger import PageLedger"),
        ("sglang_graft.cache.tree", "from sglang_graft import pool"),
        ("sglang_graft.tiers.host", "from sglang_graft.cache import node"),
        ("sglang_graft.engine.bind", "import sglang.srt\nimport graft_kernels.sgmv"),
        ("sglang_graft.cli.app", "from sglang_graft.config import OPTIONS"),
        ("sglang_graft.engine.hooks", "from sglang_graft import VERSION"),
        ("graft_kernels.sgmv.reference", "from graft_kernels.sgmv.api import Side\nimport torch"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_relative_import_in_a_package_starts_at_that_package() -> None:
    source = "from .node import Node\nfrom ..engine import hooks"
    found = violations(source, "sglang_graft.cache", is_package=True)
    assert found == [
        "sglang_graft.cache:2 imports sglang_graft.engine.hooks: cache/ may import only ['pool']"
    ]


@pytest.mark.parametrize("package", ["pool", "adapters", "cache", "tiers", "tenants", "sim"])
def test_what_a_package_says_that_it_has_is_there(package: str) -> None:
    module = importlib.import_module(f"sglang_graft.{package}")
    missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
    assert missing == []
