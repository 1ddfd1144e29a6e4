"""Options of `apollo pretrain`: files mean what flags mean; what cannot be is refused before anything is loaded."""

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from yaml.parser import Parser

from apollo_optim.cli import _class, _command, main
from apollo_optim.train import pretrain as module
from apollo_optim.train import sinks
from apollo_optim.train.config import FREE, flat, kept, read_yaml, save_settings, saved_options, with_values
from apollo_optim.train.methods import METHODS
from apollo_optim.train.pretrain import PretrainOptions
from apollo_optim.train.run import RunFolder
from apollo_optim.train.tuning.config import FinetuneOptions


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError("the corpus was about to be read")

    monkeypatch.setattr(module, "prepared_corpus", refused)


OPTIONS = {
    "model": "9m",
    "data": "a.txt,b.jsonl",
    "method": "fira",
    "lr": 1e-3,
    "betas": [0.9, 0.95],
    "compile": False,
    "activation_checkpointing": True,
    "steps": 7,
    "micro-batch": "auto",
    "scale": "auto",
    "clip": None,
    "seed": 3,
    "out": "some/where",
}
FLAGS = [
    "--model", "9m", "--data", "a.txt,b.jsonl", "--method", "fira", "--lr", "1e-3", "--betas", "0.9", "0.95",
    "--compile", "False", "--activation-checkpointing", "--steps", "7", "--micro-batch", "auto", "--scale", "auto",
    "--clip", "None", "--seed", "3", "--out", "some/where",
]  # fmt: skip


def test_a_file_means_what_flags_mean(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(OPTIONS) + "final_lr: 2e-1\n")  # which YAML takes for a string
    by_file = _command(["pretrain", "--config", str(file)])
    by_flags = _command(["pretrain", *FLAGS, "--final-lr", "0.2"])
    assert dataclasses.replace(by_file, config=None) == by_flags
    assert by_flags.method.betas == (0.9, 0.95)
    assert by_flags.model.compile is False


def test_the_demo_is_a_run_that_can_be():
    demo = Path(__file__).parents[1] / "examples" / "demo.yaml"
    command = _command(["pretrain", "--config", str(demo)])
    command.check(world=1)
    assert (command.model.model, command.data.data, command.method.method) == ("1m", "examples/stories.txt", "apollo")
    assert (demo.parents[1] / command.data.data).stat().st_size < 200_000


@pytest.mark.parametrize(("typed", "meant"), [("2M", 2_000_000), ("1.5k", 1500), ("0.3B", 300_000_000), ("1e3", 1000)])
def test_a_number_of_tokens_may_have_a_unit(typed, meant):
    assert _command(["pretrain", "--tokens", typed]).schedule.tokens == meant


def test_a_part_of_a_token_is_none(capsys):
    assert main(["pretrain", "--tokens", "1.0005k"]) == 2
    assert "--tokens must be an integer, got 1.0005k" in capsys.readouterr().err


def test_a_flag_counts_more_than_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: 9m\nseed: 3\nactivation_checkpointing: true\n")
    command = _command(["pretrain", "--seed", "4", "--config", str(file), "--no-activation-checkpointing"])
    assert (command.model.model, command.run.seed, command.model.activation_checkpointing) == ("9m", 4, False)


@pytest.mark.parametrize("given", [["pretrain", *FLAGS], ["finetune", "--model", "m", "--lr", "1e-3", "2e-3"]])
def test_what_a_run_saves_of_its_options_gives_them_back(tmp_path, given):
    options, path = _command(given), tmp_path / "config.yaml"
    save_settings(path, options)
    assert kept(saved_options(path, type(options))) == kept(options)
    assert kept(_command([given[0], "--config", str(path)])) == kept(options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: 9m", "'modle' is unknown; did you mean 'model'?"),
        ("batch-token: 9", "'batch-token' is unknown; did you mean 'batch_tokens'?"),
        ("learning_rate: 9", "'learning_rate' is unknown; did you mean 'lr'?"),
        ("steps: many", "steps must be an integer, got many"),
        ("steps: [5]", "steps must be an integer, got [5]"),
        ("betas: [0.9]", "betas must be 2 numbers, as in 0.9,0.95, got [0.9]"),
        ("lr: {apollo: 1}", "lr must be a value or a list of values"),
        ("resume: 1", "resume must be true or false, got 1"),
        ("config: other.yaml", "a file of options cannot name another"),
        ("- model", "must be options and their values"),
        ("a: b: c", 'cannot be read as YAML: mapping values are not allowed here\n  in "run.yaml", line 1, column 5'),
        ("a: \a", 'special characters are not allowed\n  in "run.yaml", position 3'),
        ("seed: !!timestamp foo", "cannot be read as YAML"),
        ("seed: !!int ''", "cannot be read as YAML"),
        ("compile: !!bool foo", "cannot be read as YAML"),
        ("data: " + "[" * 100_000, "it is nested deeper than options and lists of values"),
        ("steps: 5\nseed: 1\nsteps: 6", "steps is there twice"),
        ("batch-tokens: 512\nbatch_tokens: 1024", "batch_tokens is there twice"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ndata: *c", "it has an alias (*)"),
        ("seed: " + "9" * 5000, "cannot be read as YAML"),
        ("# " + "x" * 2**20, "it has more than 1,048,576 bytes"),
        ("data: \ud800", "cannot be read as YAML"),
    ],
    ids=range(22),
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "run.yaml").write_text(text, errors="surrogatepass")
    assert main(["pretrain", "--config", str(tmp_path / "run.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_options_is_parsed_once(tmp_path, monkeypatch):
    begin, begun = Parser.parse_stream_start, []

    def counted(parser):
        begun.append(parser)
        return begin(parser)

    monkeypatch.setattr(Parser, "parse_stream_start", counted)
    (tmp_path / "run.yaml").write_text("steps: 5\nbetas: [0.9, 0.95]\n")
    assert read_yaml(tmp_path / "run.yaml") == {"steps": 5, "betas": [0.9, 0.95]}
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--config nowhere.yaml", "nowhere.yaml cannot be read"),
        ("--model 350M", "--model '350M' is unknown; did you mean '350m'?"),
        ("--method apolo", "--method 'apolo' is unknown; did you mean 'apollo'?"),
        ("--method adamw --rank 8", "--rank has no effect on --method adamw"),
        (
            "--method apollo --state-dtype nf4",
            "--state-dtype nf4 is for --method factored-adamw and artemis, got --method",
        ),
        ("--steps 5 --tokens 100", "--steps 5 and --tokens 100 say the same thing"),
        ("--steps 1.5", "--steps must be an integer, got 1.5"),
        ("--betas 0.9", "--betas must be 2 numbers, as in 0.9,0.95, got 0.9"),
        ("--betas 0.9 0.95 x", "--betas must be 2 numbers, as in 0.9,0.95, got 0.9 0.95 x"),
        ("--dtype fp16", "--dtype 'fp16' is unknown; did you mean 'bf16'? One of: bf16, fp32"),
        ("--compile perhaps", "--compile must be true or false, got perhaps"),
        ("--resume 1m", "--resume must be true or false, got 1m"),
        ("--vocabulary 2m", "--vocabulary must be from 257 to 1,048,576, got 2000000"),
        ("--model=", "--model '' is unknown. One of: 1m"),
        ("--lr", "--lr needs a value: a number"),
        ("--steps 0", "--steps must be above 0"),
        (
            "--steps 1e30",
            "--steps must be above 0 and at most 1,000,000,000,000,000, got 1000000000000000019884624838656",
        ),
        (
            "--tokens 1e30",
            "--tokens must be above 0 and at most 1,000,000,000,000,000, got 1000000000000000019884624838656",
        ),
        ("--batch-tokens 256e30", "--batch-tokens must be above 0 and at most 1,000,000,000,000,000, got 256"),
        ("--sequence 4096", "--sequence 4096 is longer than the 2048 positions that the model knows"),
        ("--positions 1e30", "--positions must be an integer from 1 to 2,147,483,648, got 1000"),
        ("--workers 1e30", "--workers must be from 1 to 4,194,304, or none for one for each core, got 1000"),
        ("--max-document 1e30", "--max-document must be from 1 to 2**62 bytes, got 1000"),
        ("--clip -1.0", "--clip must be above 0"),
        ("--warmup 2", "--warmup must be a fraction from 0 to 1"),
        ("--sequence 1", "--sequence must be at least 2"),
        ("--batch-tokens 1000", "--batch-tokens must be a multiple of --sequence 256, got 1000; 1024 is"),
        ("--micro-batch 0", "--micro-batch must be"),
        (
            "--micro-batch 100",
            "100 does not divide the 16 sequences that a rank reads in a step; 16 does",
        ),
        (
            "--batch-tokens 256e9 --micro-batch 1001",
            "1001 does not divide the 1000000000 sequences that a rank reads in a step; 1000 does",
        ),
        ("--keep 0", "--keep must be at least 1"),
        ("--seed -1", "--seed must be an integer"),
        ("--wandb project", "--wandb needs wandb, which is not installed"),
        ("--trackio project", "--trackio needs trackio, which is not installed"),
        ("--mlflow experiment", "--mlflow needs mlflow, which is not installed"),
        ("--tokenizer nowhere", "--tokenizer 'nowhere' is not there"),
        ("--held-out 2.0", "--held-out must be a share"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    assert main(["pretrain", "--out", str(tmp_path / "run"), *flags.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.fixture
def words(tmp_path):
    """The file of a tokenizer, which is not read."""
    (tmp_path / "words.json").write_text("{}")
    return tmp_path / "words.json"


@pytest.mark.parametrize("place", ["flags", "file"])
def test_the_size_of_a_tokenizer_beside_one_that_is_there_is_refused(tmp_path, words, capsys, place):
    file = tmp_path / "run.yaml"
    file.write_text(f"tokenizer: {words}\nvocabulary: 8000\n")
    given = ["--config", str(file)] if place == "file" else ["--tokenizer", str(words), "--vocabulary", "8000"]
    assert main(["pretrain", "--out", str(tmp_path / "run"), *given]) == 2
    error = capsys.readouterr().err
    assert f"--vocabulary 8000 has no effect beside the tokenizer {words}: it is for one that is trained" in error
    assert "leave one of them out" in error
    assert not (tmp_path / "run").exists()


def test_the_size_of_a_tokenizer_beside_tokens_is_refused(tmp_path, capsys):
    (tmp_path / "index.json").write_text("{}")  # by which a folder has tokens; it is not read
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "run")]
    assert main(["pretrain", *given, "--vocabulary", "8000"]) == 2
    error = capsys.readouterr().err
    assert f"--vocabulary 8000 has no effect beside --data {tmp_path}, which is tokens already" in error
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        main(["pretrain", *given])
    _command(["analyze", "ratio", "--data", str(tmp_path)]).check(world=1)


def test_the_default_size_of_a_tokenizer_goes_with_one_that_is_there(tmp_path, words):
    """Every run saves both, and its settings may be those of another."""
    file = tmp_path / "run.yaml"
    file.write_text(f"tokenizer: {words}\nvocabulary: 4096\n")
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        main(["pretrain", "--out", str(tmp_path / "run"), "--config", str(file)])


@pytest.mark.parametrize("flags", [["--resume"], ["--auto-resume", "--vocabulary", "8000"]])
def test_a_run_that_began_with_a_tokenizer_and_the_size_of_one_goes_on(tmp_path, words, flags):
    folder = begun(tmp_path / "run", tokenizer=str(words), vocabulary=8000)
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        main(["pretrain", "--out", str(folder), *flags])


@pytest.mark.parametrize("option", ["--tokenizer", "--model"])
def test_an_analysis_with_a_tokenizer_asks_for_no_size_of_another(tmp_path, words, option):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words.rename(tmp_path / "tokenizer.json")
    command = _command(["analyze", "ratio", option, str(tmp_path)])
    assert command.data.vocabulary == PretrainOptions().data.vocabulary
    command.check(world=1)


def test_a_run_in_place_of_its_model_is_refused_with_the_folder_of_that(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["pretrain", "--model", str(tmp_path), "--out", str(tmp_path / "further")]) == 2
    assert f"no Hugging Face model: its model is in {tmp_path}/model, give that" in capsys.readouterr().err


def test_a_sequence_longer_than_the_models_own_positions_is_refused_before_the_text_is_read(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    given = ["--sequence", "65", "--batch-tokens", "65", "--steps", "1"]
    assert main(["pretrain", "--model", str(tmp_path), "--out", str(tmp_path / "run"), *given]) == 2
    assert "--sequence 65 is longer than the 64 positions that the model knows" in capsys.readouterr().err


def test_ranks_that_cannot_share_a_batch_are_told_what_they_could(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["pretrain", "--out", str(tmp_path)]) == 2
    assert "which 3 ranks cannot share evenly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--modle", "--model"),
        ("--batch-token=9", "--batch-tokens"),
        ("--learning-rate", "--lr"),
        ("--epochs", "--steps"),
        ("--epoch", "--steps"),
        ("--otu", "--out"),
        ("--output-dir", "--out"),
        ("--silent", "--quiet"),
        ("--quite", "--quiet"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(capsys, flag, meant):
    assert main(["pretrain", flag, "9"]) == 2
    assert f"{flag.partition('=')[0]} is unknown; did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--frobnicate", "--x", "--hyperspeed"])
def test_an_option_that_is_like_none_gets_no_suggestion(capsys, flag):
    assert main(["pretrain", flag, "9"]) == 2
    assert f"{flag} is unknown; --help lists the options" in capsys.readouterr().err


def test_a_value_that_had_another_name_is_taken(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("vocabulary_state: elementwise\n")
    for given in (["--vocabulary-state", "elementwise"], ["--config", str(file)]):
        assert _command(["pretrain", *given]).method.vocabulary_state == "adamw"


def test_what_people_type_is_taken(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("compile: yes\nstep-in-backward: 'True'\nbetas: 0.9,0.95\nsteps: 1e3\ngrowth_limit: off\n")
    typed = "--compile true --step-in-backward True --betas 0.9,0.95 --steps 1e3 --growth-limit off"
    for command in (
        _command(["pretrain", *typed.split()]),
        _command(["pretrain", *typed.replace(" ", "=").replace("=--", " --").split()]),
        _command(["pretrain", "--config", str(file)]),
    ):
        assert (command.model.compile, command.run.step_in_backward, command.method.betas) == (True, True, (0.9, 0.95))
        assert (command.schedule.steps, command.method.growth_limit) == (1000, "off")
        assert type(command.schedule.steps) is int
    off = _command(["pretrain", "--no-compile", "--step-in-backward", "false", "--clip", "none", "--rank", "1e2"])
    assert (off.model.compile, off.run.step_in_backward, off.schedule.clip, off.method.rank) == (
        False,
        False,
        None,
        100,
    )


def test_the_defaults_fit_the_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    small = _command(["pretrain"])
    assert (small.model.model, small.schedule.batch_tokens, small.steps) == ("1m", 4096, 500)
    assert small.run.eval_tokens < 100_000
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    large = _command(["pretrain"])
    assert (large.model.model, large.schedule.batch_tokens, large.steps) == ("60m", 131_072, 10_000)


def test_a_model_that_nobody_gave_a_length_needs_one(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["pretrain", "--model", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "--steps or --tokens must say how long" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["pertrain"]) == 2
    assert "did you mean 'pretrain'?" in capsys.readouterr().err


def begun(folder, **options):
    """A folder in which a run has begun."""
    folder.mkdir()
    command = _command(["pretrain", "--model", "9m", "--steps", "7", "--dtype", "fp32", "--device", "cpu"])
    RunFolder(folder).write_settings(with_values(command, options))
    return folder


def test_a_folder_with_a_run_in_it_is_refused_without_resume(tmp_path, capsys):
    assert main(["pretrain", "--out", str(begun(tmp_path / "run")), "--model", "9m", "--steps", "7"]) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error
    assert "--resume" in error


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["new", "resumed"])
@pytest.mark.parametrize("name", ["model", "checkpoints", "tensorboard", "metrics.jsonl", "run.json", "curves.png"])
def test_a_folder_with_files_of_somebodys_is_refused_and_left_as_it_is(tmp_path, capsys, name, resume):
    theirs = tmp_path / "run" / name if "." in name else tmp_path / "run" / name / "weights"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--model", "9m", "--steps", "7", *resume]) == 2
    assert f"holds {name}, and no run that they would belong to" in capsys.readouterr().err
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [theirs]


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["new", "resumed"])
def test_settings_of_another_program_are_refused_and_left_as_they_are(tmp_path, capsys, resume):
    (tmp_path / "config.yaml").write_text("learning_rate: 1\n")
    assert main(["pretrain", "--out", str(tmp_path), "--model", "9m", "--steps", "7", *resume]) == 2
    assert "config.yaml was not written by a run: it lacks data, method, micro_batch" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "learning_rate: 1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 1", "--seed is 1, and the run began with 0"),
        ("--steps 6", "--steps is 6, and the run began with 7"),
        ("--tokens 4096", "--steps is 1, and the run began with 7"),
        ("--method adamw", "--method is adamw, and the run began with apollo"),
        ("--betas 0.9 0.95", "--betas is [0.9, 0.95], and the run began without it;"),
    ],
)
def test_resuming_with_another_configuration_names_what_differs(tmp_path, capsys, flags, message):
    assert main(["pretrain", "--resume", "--out", str(begun(tmp_path / "run")), *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
def test_resuming_where_there_is_no_run_is_refused(tmp_path, capsys, there):
    if there:
        (tmp_path / "run").mkdir()
    flags = ["--out", str(tmp_path / "run"), "--model", "9m", "--steps", "7"]
    assert main(["pretrain", *flags, "--resume"]) == 2
    error = capsys.readouterr().err
    assert f"there is no run in {tmp_path / 'run'} to continue" in error
    assert "--auto-resume" in error
    assert list(tmp_path.rglob("*")) == ([tmp_path / "run"] if there else [])
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        main(["pretrain", *flags, "--auto-resume"])


def test_a_run_begun_before_there_was_an_option_is_resumed_with_its_default(tmp_path):
    folder = begun(tmp_path / "run")
    values = yaml.safe_load((folder / "config.yaml").read_text())
    del values["max_document"], values["embedding_lr"]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        main(["pretrain", "--out", str(folder), "--resume"])


def test_a_resumed_run_has_its_own_options_and_may_change_the_free_ones(tmp_path):
    folder = begun(tmp_path / "run", seed=5, betas=(0.9, 0.95), compile=True)
    command = _command(["pretrain", "--resume", "--out", str(folder), "--log-every", "2"])
    assert (command.model.model, command.run.seed, command.method.betas) == ("9m", 5, (0.9, 0.95))
    assert (command.model.compile, command.run.log_every) == (True, 2)
    with pytest.raises(AssertionError, match="the corpus was about to be read"):
        command.execute()


def test_free_options_exist():
    assert set(FREE) <= {*flat(PretrainOptions()), *flat(FinetuneOptions())}


@pytest.mark.parametrize("name", ["pretrain", "finetune", "eval", "plot"])
def test_every_option_has_a_help_of_one_line_which_is_printed(name, capsys):
    command = _class(name)
    assert main([name, "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    documented = {name: text for section in sections(command) for name, text in helps(section)}
    assert documented.keys() == option_names(command)
    for option, text in documented.items():
        assert "\n" not in text, option
        assert (" ".join(text.split()) in printed) != (option in getattr(command, "WITHOUT", ())), option


@pytest.mark.parametrize(("command", "without"), [(PretrainOptions, set()), (FinetuneOptions, {"low-rank"})])
def test_the_help_of_method_names_every_one(command, without):
    documented = {name: text for section in sections(command) for name, text in helps(section)}
    assert set(re.findall(r"[a-z0-9-]+", documented["method"])) & METHODS.keys() == METHODS.keys() - without


def test_no_state_of_the_vocabulary_is_its_default_and_the_help_says_so(capsys):
    asked, usual = (_command(["pretrain", *words]).method for words in (["--vocabulary-state", "none"], []))
    assert asked == usual
    assert main(["pretrain", "--help"]) == 0
    assert "By default, which is also what none means," in " ".join(capsys.readouterr().out.split())


def option_names(command):
    """The options of a command, those of its sections included."""
    own = {field.name for field in dataclasses.fields(command) if not is_section(field)}
    return own.union(*(option_names(section) for section in sections(command)[1:]))


def sections(command):
    """The dataclasses that hold a command's options: its own and its sections."""
    return [command, *(field.default_factory for field in dataclasses.fields(command) if is_section(field))]


def is_section(field):
    return dataclasses.is_dataclass(field.default_factory)


def helps(section):
    """(field, the string under it) of a dataclass and of those it inherits from."""
    for owner in reversed(section.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for field, under in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(getattr(under, "value", None), ast.Constant):
                yield field.target.id, under.value.value
