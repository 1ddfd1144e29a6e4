"""Imports flow one way, and importing the package brings in nothing heavier than torch."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import apollo_optim

SOURCE = Path(apollo_optim.__file__).parent

# A unit (a package or a module at the top) may import from itself and from units of the lines above it.
LEVELS = [
    {"core", "choices", "extras", "terminal"},
    {"distributed", "flags"},
    {"quant"},
    {"kernels", "stepping"},
    {"fused", "host_state"},
    {"options", "state"},
    {"param_groups", "state_dict", "step_plan"},
    {"optimizer"},
    {"variants", "in_backward"},
    {"memory", "llama"},
    {"integrations"},
    {"planner"},
    {"__init__"},
    {"train"},
    {"evaluation", "evidence"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {unit: number for number, units in enumerate(LEVELS) for unit in units}

# Beside torch and the standard library, and not when the package itself is imported.
GUESTS = {
    "quant": {"triton"},
    "kernels": {"triton"},
    "fused": {"triton"},
    "integrations": {"transformers", "accelerate"},
    "train": {
        "transformers",
        "matplotlib",
        "numpy",
        "datasets",
        "safetensors",
        "peft",
        "torchao",
        "bitsandbytes",
        "adam_mini",
        "liger_kernel",
        "cut_cross_entropy",
        "yaml",
        "wandb",
        "trackio",
        "mlflow",
        "triton",
        "filelock",
        "pyarrow",
        "sentencepiece",
        "tokenizers",
        "trl",
        "jinja2",
        "huggingface_hub",
    },
    "evaluation": {"transformers", "pyarrow", "lm_eval", "peft"},
    "evidence": {"plotly"},
    "commands": {"triton"},
}

FILES = sorted(SOURCE.rglob("*.py"))


def dotted(file: Path) -> str:
    """core/rule.py as "core.rule"; a package's __init__ as the package."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(file: Path) -> tuple[set[str], set[str]]:
    """(modules of ours, top-level packages of others) that a file imports anywhere in it."""
    package = [*file.relative_to(SOURCE).parent.parts]
    ours, others = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            found = [".".join(["apollo_optim", *base, alias.name]) for alias in node.names]
        else:
            continue
        for name in found:
            top, _, rest = name.partition(".")
            if top == "apollo_optim":
                ours.add(module_of(rest))
            elif top not in sys.stdlib_module_names:
                others.add(top)
    return ours - {dotted(file)}, others


def module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a file of ours: the rest is something inside it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts[:length])
    return "__init__"


@pytest.mark.parametrize("file", FILES, ids=dotted)
def test_imports_flow_one_way(file):
    unit = dotted(file).split(".")[0]
    assert unit in LEVEL, f"{unit} has no place yet: give it one in LEVELS"
    ours, others = imports(file)
    for module in ours:
        other = module.split(".")[0]
        assert other == unit or LEVEL[other] < LEVEL[unit], f"{dotted(file)} imports {module}"
    # What torch itself requires is there wherever torch is.
    assert others <= {"torch", "typing_extensions"} | GUESTS.get(unit, set())


def test_no_module_imports_itself_by_a_detour():
    graph = {dotted(file): imports(file)[0] for file in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_walk_sees_the_imports_there_are():
    ours, others = imports(SOURCE / "optimizer.py")
    assert {"core.rule", "options", "state", "state_dict", "param_groups"} <= ours
    assert others == {"torch"}
    assert "core.rule" in imports(SOURCE / "variants.py")[0]


def test_only_distributed_speaks_of_local_shards():
    for file in FILES:
        if dotted(file) != "distributed":
            attributes = {
                node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
            }
            assert not attributes & {"to_local", "full_tensor", "placements"}, dotted(file)


def test_importing_the_package_brings_in_nothing_beside_torch():
    # A process of its own: this one has imported everything already.
    script = (
        "import sys, json, torch; before = set(sys.modules); from apollo_optim import APOLLO; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    new = set(json.loads(output))
    assert "apollo_optim.optimizer" in new
    foreign = {name for name in new if name.split(".")[0] not in {"apollo_optim", *sys.stdlib_module_names}}
    # Parts of torch that it imports lazily would be there too; there are none, and the compiler must never be.
    assert foreign == set()


MAP = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().partition("## How the code")[2].partition("\n## ")[0]


def test_the_map_of_the_code_has_every_folder_and_names_what_is_there():
    folders, questions = MAP.split("Five questions")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", folders))
    assert {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()} <= named
    inside = [SOURCE.parent.parent, SOURCE, SOURCE / "stepping", SOURCE / "train"]
    assert {name for name in named if not any((folder / name).exists() for folder in inside)} == set()
    rows = [row.split("|")[2] for row in questions.splitlines() if row.startswith("| ")][1:]
    assert [len(re.findall(r"`[\w/]+\.py`", row)) for row in rows] == [3, 2, 3, 4, 5]
    for row in rows:
        for file, within in re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", row):
            defined = {
                node.name
                for node in ast.walk(ast.parse((SOURCE / file).read_text()))
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            }
            assert {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", within)} <= defined, file


def test_a_class_name_stands_for_one_thing():
    modules: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(dotted(file))
    assert len(modules) > 100
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
