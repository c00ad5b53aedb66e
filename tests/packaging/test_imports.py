"""Imports follow the arrows between the packages, and heavy libraries stay in the engine processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime", "engines", "planner", "transfer")
TRANSFER_CORES = ("prefill_end", "decode_end", "ends", "ledger", "ledger_effects", "layout", "events")

# What a package may import of the others. A name stands for the module and all below it.
ENGINE_SIDE_OF_RUNTIME = (
    "runtime.messages",
    "runtime.errors",
    "runtime.logs",
    "runtime.host",
    "runtime.service",
)  # shared words
RUNTIME_SIDE_OF_ENGINES = (
    "engines.protocol",
    "engines.config",
    "engines.models.resolve",
    "engines.native.grammar",  # its check: requests are turned away at the door
    "engines.token_bytes",  # how tokens are spelled, for log probabilities
)
ARROWS = {
    "planner": ("planner",),
    "transfer": ("transfer", "runtime.errors"),
    "engines": ("engines", "transfer", "planner.events", *ENGINE_SIDE_OF_RUNTIME),
    "runtime": ("runtime", "planner", "transfer", *RUNTIME_SIDE_OF_ENGINES),
}
ARROWS_OF_FILES = {
    # The one command of the project is also what an engine process starts with.
    "runtime/cli.py": ("engines.lifeline", "engines.main"),
    # A replay's engines are objects in the runtime's own process.
    "runtime/replay/": ("engines.sim",),
}
# Libraries that are imported in one place only.
HOMES = {
    "torch": ("engines/native/", "engines/vllm/"),
    "vllm": ("engines/vllm/",),
    "nixl": ("transfer/nixl_agent.py",),
}
HEAVY = ("torch", "vllm", "nixl", "nixl_cu12", "nixl_cu13")


def sources(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def module_name(source: Path) -> str:
    parts = source.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(("dynrt", *(part for part in parts if part != "__init__")))


def imported_names(source: Path) -> Iterator[str]:
    """Absolute names of all imports, wherever in the file; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def is_arrow(name: str, file: str) -> bool:
    own = [modules for start, modules in ARROWS_OF_FILES.items() if file.startswith(start)]
    allowed = sum(own, ARROWS[file.split("/")[0]])
    return any(is_within(name, f"dynrt.{module}") for module in allowed)


def is_at_home(name: str, file: str) -> bool:
    library = name.split(".")[0].removesuffix("_cu12").removesuffix("_cu13")
    return file.startswith(HOMES.get(library, ("",)))


def imports(package: str) -> list[tuple[str, str]]:
    """Pairs of a file and a name that it imports."""
    files = {source.relative_to(REPOSITORY).as_posix(): source for source in sources(package)}
    found = [(file, name) for file, source in files.items() for name in imported_names(source)]
    assert found, f"{package} imports nothing: are its sources still where this test looks?"
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows_between_packages(package: str) -> None:
    ours = [(file, name) for file, name in imports(package) if is_within(name, "dynrt")]
    assert [(file, name) for file, name in ours if not is_arrow(name, file)] == []


def test_cores_import_cores_only() -> None:
    """The planner and the handoff's state machines run anywhere: in tests, simulations and benches."""
    for core in TRANSFER_CORES:
        names = imported_names(REPOSITORY / "transfer" / f"{core}.py")
        ours = [name for name in names if is_within(name, "dynrt")]
        assert [name for name in ours if not is_within(name, "dynrt.transfer")] == [], core


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_imported_under_dynrt_only(package: str) -> None:
    assert [(file, name) for file, name in imports(package) if name.split(".")[0] in PACKAGES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_libraries_are_imported_at_home_only(package: str) -> None:
    assert [(file, name) for file, name in imports(package) if not is_at_home(name, file)] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("planner/index.py", "dynrt.runtime.errors.DynrtError"),
        ("engines/native/model.py", "dynrt.planner.cost"),
    ],
)
def test_forbidden_arrow_is_seen(file: str, name: str) -> None:
    assert not is_arrow(name, file)


@pytest.mark.parametrize(
    ("file", "name"), [("engines/text.py", "torch.nn"), ("runtime/worker.py", "nixl_cu12._api")]
)
def test_library_away_from_home_is_seen(file: str, name: str) -> None:
    assert not is_at_home(name, file)


# --- what the runtime process loads ---------------------------------------------------------------

LIGHT_MODULES = sorted(
    [module_name(source) for package in ("runtime", "planner") for source in sources(package)]
    + [f"dynrt.transfer.{core}" for core in TRANSFER_CORES]
)

# Imports one module after the other and tells, for each, which heavy libraries were not loaded before it.
REPORT_HEAVY_IMPORTS = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
report = {}
for name in names:
    before = {library for library in heavy if library in sys.modules}
    try:
        importlib.import_module(name)
        report[name] = [library for library in heavy if library in sys.modules and library not in before]
    except Exception as error:
        report[name] = [f"{type(error).__name__}: {error}"]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def heavy_imports() -> dict[str, list[str]]:
    command = [sys.executable, "-c", REPORT_HEAVY_IMPORTS, json.dumps([LIGHT_MODULES, HEAVY])]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    report: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    return report


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_runtime_process_loads_no_heavy_library(heavy_imports: dict[str, list[str]], module: str) -> None:
    assert heavy_imports[module] == []
