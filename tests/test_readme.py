"""What the documentation says is so: its Python runs, its commands exist and print what it shows."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from apollo_optim.cli import COMMANDS, main
from family import partly_slow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def code(page: Path) -> str:
    """Everything a page sets as code: its blocks, and what stands between backticks."""
    text = page.read_text()
    return "\n".join([*(body for _, body in FENCE.findall(text)), *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_every_python_block_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), namespace)


CONSOLE = [(name(page), block) for page in PAGES for block in blocks(page, "console")]


def seconds_long(block: str) -> bool:
    """Whether a command plans all optimizers on many GPUs, each by its real step on meta tensors."""
    prompt, _, _ = block.partition("\n")
    return "--gpus" in prompt and "--optimizer" not in prompt


# Of the long ones the first of a page, and all in `make test-all`.
FIRST = {page: block for page, block in reversed(CONSOLE) if seconds_long(block)}
QUICK = [(page, block) for page, block in CONSOLE if not seconds_long(block) or FIRST[page] == block]


@pytest.mark.parametrize(("page", "block"), partly_slow(CONSOLE, quick=QUICK), ids=lambda text: text.partition("\n")[0])
def test_every_command_prints_what_is_shown(page, block, capsys):
    prompt, _, shown = block.partition("\n")
    assert prompt.startswith("$ apollo ")
    assert main(shlex.split(prompt)[2:]) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.strip("\n").splitlines()] == shown.strip("\n").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_that_is_mentioned_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", code(page))) <= targets
    assert set(re.findall(r"(?<![\w/-])apollo ([a-z]+)", code(page))) <= set(COMMANDS)


def anchors(page: Path) -> set[str]:
    """Headings as MkDocs and GitHub address them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    lost = []
    for link in re.findall(r"\]\(([^):]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_test_that_is_named_exists():
    defined = {
        node.name
        for file in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    named = {test for page in PAGES for test in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named - defined == set()


def test_the_readme_has_blocks_to_run():
    assert len(blocks(ROOT / "README.md", "python")) >= 4


def test_getting_started_changes_few_lines_of_a_script_for_adamw(tmp_path, monkeypatch):
    page = ROOT / "docs" / "getting-started.md"
    (shown,), (script, *_) = blocks(page, "diff"), blocks(page, "python")
    for change in shown.split("@@\n"):
        after, before = (
            "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] in f" {sign}") for sign in "+-"
        )
        assert script.count(after) == 1
        script = script.replace(after, before)
    assert sum(line.startswith("+") for line in shown.splitlines()) <= 10
    assert "apollo_optim" not in script
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "before the change", "exec"), {})
    assert Path("checkpoint.pt").is_file()
