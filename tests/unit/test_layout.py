"""The layout of ADR 0001: names resolve here, every folder says its purpose, wheels hold what is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "services", "kernels")


@pytest.mark.parametrize("name", PACKAGES)
def test_top_level_names_resolve_in_this_repository(name: str) -> None:
    """All three exist on PyPI as other projects; a foreign one must never win."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert [Path(path).resolve() for path in spec.submodule_search_locations] == [ROOT / name]


def _folders_with_code() -> list[Path]:
    found = set()
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            if "__pycache__" not in path.parts:
                found.add(path.parent)
    return sorted(found)


@pytest.mark.parametrize("folder", _folders_with_code(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_folder_is_a_package_that_says_its_purpose(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.exists(), f"{folder} has no __init__.py"
    if folder.name == "versions":
        return
    assert ast.get_docstring(ast.parse(init.read_text())), f"{init} does not say what lives there"


MAPPED = (
    "shared", "shared/protocol", "shared/protocol/messages", "shared/transport", "services", "services/bench",
    "services/cache_broker", "services/chaos", "services/demo", "services/embedded", "services/gateway", "services/gpu_worker",
    "services/gpu_worker/engine", "services/gpu_worker/engine/cache", "services/gpu_worker/engine/drafters",
    "services/gpu_worker/engine/layers", "services/gpu_worker/engine/models", "services/gpu_worker/engine/sessions",
    "services/models", "services/prove", "kernels", "kernels/gate", "models/pocket/recipe",
)  # fmt: skip


@pytest.mark.parametrize("folder", MAPPED)
def test_a_folder_of_many_modules_has_a_map_of_all_of_them(folder: str) -> None:
    told = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    readme = ROOT / folder / "README.md"
    words = set(re.findall(r"\w+", told + (readme.read_text() if readme.exists() else "")))
    modules = {path.stem for path in (ROOT / folder).glob("*.py") if not path.stem.startswith("_")}
    if folder != "kernels":  # one folder an operation, named after it
        modules |= {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert modules - words == set(), f"{folder}/__init__.py does not say what these are for"


def test_kernels_has_no_version() -> None:
    """transformers probes a module of this name for one (it is another project's name)."""
    import kernels

    assert not hasattr(kernels, "__version__")


def test_the_wheel_holds_every_package() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(build["targets"]["wheel"]["only-include"]) == {*PACKAGES, "models"}
    assert build["dev-mode-dirs"] == ["."]


def test_torch_is_pinned_exactly() -> None:
    """The numerics recipe is part of the fingerprint (ADR 0002), and the pin is what finds a local CPU build."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [need for need in extras["worker"] if need.startswith("torch")] == ["torch==2.13.0"]


@pytest.mark.parametrize("extra", ["gateway", "worker", "broker", "embedded", "demo"])
def test_no_test_tool_in_what_a_user_installs(extra: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = " ".join(extras[extra])
    for tool in ("transformers", "triton", "pytest", "hypothesis", "ruff", "mypy"):
        assert tool not in named
