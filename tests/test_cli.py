"""The command `apollo`: its figures by hand, its errors, and what it needs."""

import errno
import fcntl
import io
import json
import os
import pkgutil
import re
import struct
import subprocess
import sys
import termios
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch

import apollo_optim
from apollo_optim import cli
from apollo_optim.choices import chosen
from apollo_optim.cli import COMMANDS, UNREAD, _class, _command, main
from apollo_optim.commands.memory import EXAMPLE_COLUMNS, EXAMPLE_RANK, EXAMPLE_ROWS
from apollo_optim.extras import EXTRAS
from apollo_optim.flags import Place, flag_values, options_of
from apollo_optim.planner.paper_figures import LISTED, PAPER_TOTALS, TABLE_ONE, formula_numbers, measured_numbers
from apollo_optim.terminal import width_of

BF16, STEP, SEED, NORM = 2, 4, 8, 4  # bytes of a bfloat16 number and of the scalars kept beside the moments

# LLaMA-60M by hand: 8 layers of 4 matrices 512 x 512 and 3 of 512 x 1376, 17 norms of 512, 2 matrices 512 x 32000.
ATTENTION, MLP, NORMS, VOCABULARY = 8 * 4, 8 * 3, 17, 2
WEIGHTS_60M = BF16 * (ATTENTION * 512 * 512 + MLP * 512 * 1376 + NORMS * 512 + VOCABULARY * 512 * 32000)


def printed(capsys, *arguments):
    assert main(["memory", *arguments]) == 0
    return capsys.readouterr().out


def rows(capsys, *arguments):
    return json.loads(printed(capsys, "--json", *arguments))["models"]


def adamw_bytes(count, numbers):
    return count * (2 * numbers * BF16 + STEP + SEED)


def limited_bytes(count, numbers):
    return count * (2 * numbers * BF16 + STEP + SEED + NORM)


@pytest.mark.parametrize(("optimizer", "rank"), [("apollo-mini", 1), ("apollo", 128)])
def test_state_of_60m_is_what_a_count_by_hand_gives(capsys, optimizer, rank):
    row = rows(capsys, "--model", "60m", "--optimizer", optimizer)[0]
    layers = limited_bytes(ATTENTION, rank * 512) + limited_bytes(MLP, rank * 1376) + adamw_bytes(NORMS, 512)
    assert row["rank"] == rank
    assert row["weights"] == WEIGHTS_60M == 116_147_200
    assert row["state"] == {
        "projected": layers + limited_bytes(VOCABULARY, rank * 32000),
        "adamw": layers + adamw_bytes(VOCABULARY, 512 * 32000),
        "uncounted": layers,
    }


@pytest.mark.parametrize(
    ("model", "optimizer", "rank", "figure", "source"),
    [
        ("60m", "apollo-mini", 1, "0.12", ["projected GB", "uncounted GB", "nominal GB"]),
        ("130m", "apollo-mini", 1, "0.25", ["projected GiB", "uncounted GiB"]),
        ("350m", "apollo-mini", 1, "0.69", ["projected GiB", "uncounted GiB"]),
        ("1b", "apollo-mini", 1, "2.60", ["nominal GB"]),
        ("60m", "adamw", None, "0.36", ["nominal GB"]),
        ("350m", "adamw", None, "2.06", ["projected GiB", "adamw GiB"]),
        ("350m", "adamw", None, "1.37", ["projected GiB", "adamw GiB"]),
        ("1b", "adamw", None, "7.80", ["nominal GB"]),
        ("350m", "apollo", 256, "0.34", ["projected GiB"]),
        ("7b", "apollo", 256, "1.6", ["projected GiB", "uncounted GB"]),
        ("7b", "apollo-mini", 1, "0.0", ["projected", "uncounted"]),
        ("60m", "apollo", 128, "0.24", ["as GaLore's paper has it"]),
        ("60m", "apollo", 64, "0.18", ["the same, its state halved"]),
        ("130m", "adamw", None, "0.76", ["no count of ours"]),
    ],
)
def test_the_papers_figure_is_traced(capsys, model, optimizer, rank, figure, source):
    figures = [
        (paper["gigabytes"], paper["source"])
        for row in rows(capsys, "--model", model, "--optimizer", optimizer)
        if row["rank"] == rank
        for paper in row["paper"]
    ]
    assert (figure, source) in figures


@pytest.mark.parametrize("model", PAPER_TOTALS)
def test_the_papers_row_of_half_the_rank_halves_the_state_of_its_quarter_row(model):
    quarter, eighth, weights = (float(PAPER_TOTALS[model][key]) for key in HALVED)
    assert eighth == pytest.approx((quarter + weights) / 2, abs=0.005 + 1e-9)  # printed with two digits


HALVED = ("apollo", 0.25), ("apollo", 0.125), ("apollo-mini", 1)


@pytest.mark.parametrize("name", TABLE_ONE)
@pytest.mark.parametrize(("m", "n", "r"), [(37, 61, 5), (EXAMPLE_ROWS, EXAMPLE_COLUMNS, EXAMPLE_RANK)])
def test_table_one_counts_what_a_stepped_optimizer_holds(name, m, n, r):
    held = measured_numbers(name, m, n, r)
    assert held == formula_numbers(TABLE_ONE[name][1], m, n, r)
    assert held == measured_numbers(name, n, m, r)  # the taller side is n either way


def test_without_options_every_model_and_optimizer_is_printed(capsys):
    out = printed(capsys)
    assert "Table 1" in out
    for model in ("60M", "130M", "350M", "1B", "7B", "13B"):
        assert f" {model} " in out
    for candidate in LISTED.values():
        assert f" {candidate.label} " in out


def test_output_that_is_not_a_terminal_is_plain(capsys):
    assert not set("┃│━─\x1b") & set(printed(capsys, "--model", "13b"))


def test_rank_dtypes_and_model_are_taken(capsys):
    narrow = rows(capsys, "--model", "60m", "--optimizer", "apollo", "--rank", "64")
    fraction = rows(capsys, "--model", "60m", "--optimizer", "apollo", "--rank", "0.125")
    assert len(narrow) == 1
    assert narrow == rows(capsys, "60m", "--optimizer", "apollo", "--rank", "64")  # the model also without its flag
    assert narrow[0]["state"] == fraction[0]["state"]
    wide = rows(
        capsys,
        "--model",
        "60m",
        "--optimizer",
        "apollo",
        "--rank",
        "64",
        "--state-dtype",
        "fp32",
        "--weight-dtype",
        "fp32",
    )
    assert wide[0]["weights"] == 2 * narrow[0]["weights"]
    assert narrow[0]["state"]["adamw"] < wide[0]["state"]["adamw"] < 2 * narrow[0]["state"]["adamw"]
    assert wide[0]["paper"] == []  # the paper counts bfloat16


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("--model", "360m"), "'60m'"),
        (("--model", "7B"), "'7b'"),
        (("--optimizer", "apolo"), "'apollo'"),
        (("--optimizer", "mini"), "'apollo-mini'"),
        (("--state-dtype", "bfloat16"), "'bf16'"),
        (("--weight-dtype", "float32"), "'fp32'"),
    ],
)
def test_an_unknown_value_is_answered_with_the_nearest(capsys, arguments, nearest):
    assert main(["memory", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"{arguments[0]} {arguments[1]!r} is unknown; did you mean {nearest}?" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "0"), "apollo: --rank must be an integer >= 1"),
        (("--rank", "0", "--model", "7b", "--gpus", "8"), "apollo: --rank must be an integer >= 1"),
        (("--rank", "1.0"), "got 1.0"),
        (("--optimizer", "adamw", "--rank", "8"), "--rank has no effect on adamw"),
        (("--optimizer", "apollo-mini", "--rank", "8"), "--rank has no effect on apollo-mini"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(capsys, arguments, message):
    assert main(["memory", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--int8", "all"), ("--state-device", "cpu")], ids=" ".join)
def test_what_is_not_planned_on_several_gpus_is_refused(capsys, arguments):
    assert main(["memory", "--model", "7b", "--gpus", "8", *arguments]) == 2
    assert f"{' '.join(arguments)} does not go together with --gpus 8" in capsys.readouterr().err


def test_state_on_the_host_is_counted_apart(capsys):
    flags = "--model", "60m", "--optimizer", "adamw"
    (here,), (there,) = (rows(capsys, *flags, *more) for more in ((), ("--state-device", "cpu")))
    assert here["host"] == {}
    assert there["host"] == here["state"]
    # It is one block, less steps and seeds, but for what aligns vectors.
    assert 0 <= there["state"]["adamw"] - (here["state"]["adamw"] - 75 * (4 + 8)) < 75 * 2 * 256
    assert "kept on the host (state: two buffers of it on the GPU)" in printed(capsys, *flags, "--state-device", "cpu")


def test_state_by_row_is_planned_as_it_is_sharded(capsys):
    flags = "memory", "--model", "7b", "--optimizer", "apollo-mini", "--state-dtype", "fp32", "--gpus", "8", "--json"
    states = []
    for kind in ("adamw", "rowwise"):
        assert main([*flags, "--vocabulary-state", kind]) == 0
        (planned,) = json.loads(capsys.readouterr().out)["optimizers"]
        states.append(planned["state"])
    # Of embedding and head, 4000 rows a rank.
    assert states[0] - states[1] == VOCABULARY * 4 * 4000 * (4096 - 1)


@pytest.mark.parametrize(
    ("model", "optimizer", "replicated", "filled_up"),
    [
        ("70b", "adamw", 723 * (STEP + SEED), 0),
        # A norm for each of 224 matrices. Of 96, 86 scales in each of 1024 rows of two moments are 11 on a rank.
        ("7b", "apollo", 291 * (STEP + SEED) + 224 * NORM, 96 * 2 * 1024 * (8 * 11 - 86) * 4),
    ],
)
def test_moments_in_8_bits_are_planned_on_any_number_of_ranks(capsys, model, optimizer, replicated, filled_up):
    flags = "--model", model, "--optimizer", optimizer, "--state-dtype", "int8"
    assert main(["memory", *flags, "--gpus", "8", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["optimizers"]
    whole = rows(capsys, *flags)[0]["state"]["adamw"]
    assert planned["state"] * 8 == whole + 7 * replicated + filled_up


def test_a_factored_vocabulary_keeps_a_number_for_each_row_and_column(capsys):
    flags = "--model", "60m", "--optimizer", "apollo-mini", "--state-dtype", "fp32"
    (whole,), (factored,) = (rows(capsys, *flags, *more) for more in ((), ("--vocabulary-state", "factored")))
    saved = VOCABULARY * 4 * (2 * 512 * 32000 - (512 + 32000))
    assert whole["state"]["adamw"] - factored["state"]["adamw"] == saved
    assert whole["state"]["projected"] == factored["state"]["projected"]
    assert "for the vocabulary one second moment for each row and column" in printed(
        capsys, "--model", "60m", "--vocabulary-state", "factored"
    )


@pytest.mark.parametrize("flags", [(), ("--gpus", "8")], ids=["one", "gpus"])
@pytest.mark.parametrize(("optimizer", "own"), [("apollo", "adamw"), ("artemis", "factored")])
def test_a_vocabulary_is_counted_as_its_optimizer_steps_it(capsys, optimizer, own, flags):
    def states(*more: str) -> object:
        data = json.loads(printed(capsys, "--model", "60m", "--json", *flags, "--optimizer", optimizer, *more))
        return [row["state"] for row in data["optimizers" if flags else "models"]]

    by_rule = {rule: states("--vocabulary-state", rule) for rule in ("adamw", "factored", "factored-adamw")}
    assert states() == by_rule[own]
    assert len({str(sizes) for sizes in by_rule.values()}) == len(by_rule)


@pytest.mark.parametrize("flags", [(), ("--gpus", "8")], ids=["one", "gpus"])
def test_momentum_that_stays_in_4_bits_is_said_to(capsys, flags):
    said = "of layers under Factored AdamW in 4 bits"
    asked = "--model", "60m", "--state-dtype", "int8", *flags
    assert said in printed(capsys, *asked, "--optimizer", "factored-adamw")
    assert "in 4 bits" not in printed(capsys, *asked, "--optimizer", "apollo")


def test_int8_weights_are_counted_by_codes_and_scales(capsys):
    row = rows(capsys, "--model", "60m", "--optimizer", "apollo-mini", "--int8", "layers")[0]
    # A row of 512 has 4 scales and one of 1376 has 11; two of the three matrices of an MLP have rows of 512.
    layers = ATTENTION * 512 * (512 + 4 * 4) + 8 * (2 * 1376 * (512 + 4 * 4) + 512 * (1376 + 4 * 11))
    assert row["weights"] == layers + BF16 * (NORMS * 512 + VOCABULARY * 512 * 32000)
    assert row["paper"] == []
    assert "weights in int8 in the layers, else bf16, moments in bf16" in printed(
        capsys, "--model", "60m", "--int8", "layers"
    )
    assert main(["memory", "--int8", "all", "--weight-dtype", "fp64"]) == 2
    assert "--int8 all is for weights of fp32, bf16 or fp16" in capsys.readouterr().err


# Everything is missing that neither the standard library nor torch brings: what `pip install .` leaves one with.
BARE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
known = sys.stdlib_module_names | {
    "apollo_optim", "torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath",
    "networkx", "setuptools", "sympy", "typing_extensions",
}
class Only:
    @staticmethod
    def find_spec(name, path=None, target=None):
        there = name.partition(".")[0] in known or name.startswith("_")
        return PathFinder.find_spec(name, path, target) if there else None
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Only]
from apollo_optim.cli import main
for command in "--help", "--version", "memory --model 60m", "memory --help", "doctor", "plot --help", "write --help":
    assert main(command.split()) == 0, command
for command in sys.argv[1:]:
    assert main(command.split()) == 2, command
"""


def test_the_base_install_answers_and_names_what_is_missing():
    names = [name for name in COMMANDS if name not in ("memory", "doctor", "report")]
    needing = [f"{name} x" for name in names] + [f"{name} --help" for name in names if name not in LIGHT]
    done = subprocess.run([sys.executable, "-c", BARE, *needing], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "APOLLO-Mini" in done.stdout
    assert "extra train        missing matplotlib, numpy" in done.stdout
    extras = {"finetune": "finetune", "eval": "eval"}
    missing = ", which is not installed. In a clone of the repository: "
    refused = [line.split(missing) for line in done.stderr.splitlines()]
    assert [(start.split()[:3], install) for start, install in refused] == [
        (["apollo:", name, "needs"], f"pip install '.[{extras.get(name, 'train')}]'")
        for name, _ in map(str.split, needing)
    ]


LIGHT = "report", "plot", "write"
"""Commands whose help is there at once: nothing that is shown in it depends on the machine."""


def test_help_and_version_import_nothing_heavy():
    shows = [[name, "--help"] for name in LIGHT] + [["--help"], ["--version"]]
    calls = "; ".join(f"main({each})" for each in shows)
    code = f"import sys; from apollo_optim.cli import main; {calls}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, modules = done.stdout.splitlines()
    assert shown[-1] == f"apollo-optim {apollo_optim.__version__}"
    assert not {"torch", "numpy", "transformers"} & set(modules.split())
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_extras_are_those_of_the_project():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {"pyyaml": "yaml"}
    for extra, modules in EXTRAS.items():
        required = [re.match(r"[\w-]+", line).group() for line in project["optional-dependencies"][extra]]
        others = [name for name in required if name != project["name"]]
        assert sorted(names.get(name, name.replace("-", "_")) for name in others) == sorted(modules)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: apollo {command}")


def terminal(monkeypatch, width):
    """Standard output as a terminal of this width."""
    monkeypatch.setattr("apollo_optim.commands.memory.width_of", lambda stream: width)
    monkeypatch.setattr("apollo_optim.commands.cluster.width_of", lambda stream: width)


@pytest.mark.parametrize(
    ("flags", "widths"),
    [
        ([], (80, 200)),  # all models and optimizers take a second
        (["--model", "7b"], (60, 80, 100, 200)),
        (["--model", "60m", "--gpus", "64"], (60, 200)),
    ],
    ids=["", "7b", "64 GPUs"],
)
def test_a_narrow_terminal_loses_columns_and_no_digits(capsys, monkeypatch, flags, widths):
    def words(text):
        return {word for line in text.splitlines() if line[:1] == " " for word in line.split() if word[:1].isdigit()}

    # No width changes what is counted, and counting takes longer than printing.
    for path in ("apollo_optim.commands.memory.measured_numbers", "apollo_optim.commands.cluster.optimizer_plan"):
        monkeypatch.setattr(path, cache(pkgutil.resolve_name(path)))
    whole = printed(capsys, *flags)
    for width in widths:
        terminal(monkeypatch, width)
        shown = printed(capsys, *flags)
        assert max(map(len, shown.splitlines())) <= width
        assert ("no room for" in shown) == (width < 200)
        assert words(shown)
        assert words(shown) <= words(whole)


def test_the_width_is_that_of_the_terminal():
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 93, 0, 0))
        with open(theirs, "w", closefd=False) as screen:
            assert width_of(screen) == 93
    finally:
        os.close(ours)
        os.close(theirs)
    with open(os.devnull, "w") as nowhere:
        assert width_of(nowhere) is None
    assert width_of(io.StringIO()) is None


def test_any_configuration_of_hugging_face_is_counted(capsys, tmp_path):
    config = {
        "model_type": "qwen2", "vocab_size": 500, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path / "small-qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # Two layers: q and o of 48 x 48, k and v of 24 x 48, an MLP of 3 x 100 x 48, biases of 96, two norms of 48.
    layers = 2 * (2 * 48 * 48 + 2 * 24 * 48 + 3 * 100 * 48 + 96 + 2 * 48)
    for model in (folder, folder / "config.json"):
        row = rows(capsys, "--model", str(model), "--optimizer", "adamw")[0]
        assert row["model"] == "small-qwen"
        assert row["weights"] == BF16 * (layers + 48 + 500 * 48)
        assert row["state"]["adamw"] - row["state"]["uncounted"] == adamw_bytes(1, 500 * 48)
    assert main(["memory", "--model", str(folder), "--optimizer", "adamw"]) == 0
    weights = f"{BF16 * (layers + 48 + 500 * 48) / 1e3:.3f}"
    assert weights in capsys.readouterr().out  # in kB: in GB it would be 0.000
    assert main(["memory", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert main(["memory", "--model", str(tmp_path / "config.json")]) == 2
    assert "671b; or a config.json or its folder, and there is none at that path" in capsys.readouterr().err
    (tmp_path / "t5.json").write_text('{"model_type": "t5"}')
    assert main(["memory", str(tmp_path / "t5.json")]) == 2
    assert "has no causal language model of that type" in capsys.readouterr().err
    assert main(["memory", "--model", str(folder), "--gpus", "8"]) == 2
    assert f"--gpus plans a model that it knows by name, got --model {folder}. One of: 1m," in capsys.readouterr().err


def test_models_of_the_planner_are_counted_without_gpus(capsys):
    assert rows(capsys, "--model", "8b", "--optimizer", "apollo-mini")[0]["weights"] == BF16 * 8_030_261_248


def test_doctor_says_what_can_be_used(capsys, monkeypatch):
    monkeypatch.setattr("apollo_optim.extras.find_spec", lambda name: None if name == "pyarrow" else object())
    assert main(["doctor"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if line)
    assert lines["torch"].strip() == torch.__version__
    assert lines["extra train"].strip() == "missing pyarrow; in a clone of the repository: pip install '.[train]'"
    assert lines["extra data"].strip() == "usable"
    assert "usable" in lines["fused kernels"]


def test_the_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "apollo_optim", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"apollo-optim {apollo_optim.__version__}\n")


def test_a_command_runs_with_closed_output(monkeypatch):
    """As `apollo memory 60m >&-` closes it, and as a service may begin."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["memory", "60m"]) == 0


def test_output_that_nobody_reads_ends_the_command_without_a_word():
    """As `apollo memory | head` does."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "apollo_optim", "--help"], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (UNREAD, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_named_and_no_traceback_shown(buffered):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "apollo_optim", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "apollo: the output cannot be written: No space left on device\n")


def test_a_file_that_finds_no_space_leaves_the_output_open(monkeypatch, capfd):
    def no_space(given):
        raise OSError(errno.ENOSPC, "No space left on device", "tokens.bin")

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_status", no_space)
        assert main([]) == 2
    assert capfd.readouterr().err == "apollo: tokens.bin cannot be written: No space left on device\n"
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("apollo-optim ")


def test_a_value_by_place_and_by_flag_is_refused(capsys):
    assert main(["memory", "7b", "--model", "1b"]) == 2
    assert capsys.readouterr().err == "apollo: MODEL is given twice: '7b', and by --model 1b; leave one out\n"


@pytest.mark.parametrize("flags", [["pretrain", "--out"], ["plot"], ["finetune", "--cache"], ["memory"]], ids=" ".join)
def test_a_name_that_is_not_utf8_is_refused_before_any_work(capsys, flags):
    """Runs write names into JSON and YAML, which have no other text."""
    assert main([*flags, "caf\udce9"]) == 2
    name = flags[-1] if len(flags) == 2 else {"plot": "RUNS", "memory": "MODEL"}[flags[0]]
    assert capsys.readouterr().err == f"apollo: {name} must be UTF-8, got 'caf\\udce9'\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_of_nobody_is_refused_wherever_files_are_named(capsys, command):
    named = {
        option.name: option
        for option in options_of(_class(command)).values()
        if {Path, Place} & {option.kind, *get_args(option.kind)}
    }
    for option in named.values():
        assert main([command, f"{option.flag}=~nosuchuser/a"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"apollo: {option.flag} must be ")
        assert said.endswith("(~user only where this machine has that user), got ~nosuchuser/a\n")
    paths = {"model", "data", "validation", "tokenizer", "chat_template", "cache", "config", "out"}
    assert options_of(_class(command)).keys() & paths == named.keys() & paths


def test_a_home_is_found_in_every_item_of_a_list_and_in_no_prompt(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert flag_values(_class("pretrain"), ["--data", "~/a.txt, ~/b/*.txt,c"]) == {
        "data": "/home/me/a.txt,/home/me/b/*.txt,c"
    }
    assert flag_values(_class("write"), ["~", "~nosuchuser"]) == {"model": "/home/me", "prompt": "~nosuchuser"}


def test_what_has_a_place_may_be_given_by_its_flag():
    by_place, by_flag = (_command(["write", *words]) for words in (["run", "Dorothy"], ["Dorothy", "--model", "run"]))
    assert by_place == by_flag


ARROW = "Failed to open local file 'secret.txt'. Detail: [errno 13] Permission denied"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ((errno.EACCES, "Permission denied", "secret.txt"), "secret.txt cannot be opened: Permission denied"),
        ((errno.EACCES, ARROW), f"pretrain: {ARROW}"),  # as pyarrow does
        (("no way in",), "pretrain: no way in"),
    ],
)
def test_a_file_that_may_not_be_opened_is_named(capsys, monkeypatch, tmp_path, raised, said):
    def refuse(self):
        raise PermissionError(*raised)

    (tmp_path / "secret.txt").write_text("text " * 99)
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may open whatever there is
    flags = ["--data", str(tmp_path / "secret.txt"), "--out", str(tmp_path / "run"), "--cache", str(tmp_path)]
    assert main(["pretrain", "--model", "1m", *flags]) == 2
    assert capsys.readouterr().err == f"apollo: {said}\n"


def test_chosen_returns_a_valid_value_as_it_is():
    assert chosen("--model", "7b", ["60m", "7b"]) == "7b"


def test_a_picture_of_another_kind_is_refused_with_those_that_are_drawn(capsys, tmp_path):
    assert main(["plot", str(tmp_path), "--out", "curves.nope"]) == 2
    assert "--out must be a picture (.png, .svg, .pdf), got curves.nope" in capsys.readouterr().err
