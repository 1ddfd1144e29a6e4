"""`apollo write`: a text goes on, a conversation is answered, and what cannot be is said."""

import io
import sys

import pytest

from apollo_optim.cli import main
from finetuning import write_gguf
from questions import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


class Terminal(io.StringIO):
    """Standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def written(capsys, *flags: str) -> str:
    assert main(["write", *flags, "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_a_text_goes_on_from_its_prompt(model, capsys):
    found = written(capsys, str(model), "the cat", "--length", "12", "--seed", "3")
    assert found.startswith("the cat")
    assert len(found) > len("the cat\n")
    assert found == written(capsys, str(model), "the cat", "--length", "12", "--seed", "3")
    assert found != written(capsys, str(model), "the cat", "--length", "12", "--seed", "4")


def test_a_character_that_the_output_cannot_hold_is_replaced(model, monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["write", str(model), "the caf\u00e9", "--length", "3", "--device", "cpu"]) == 0
    assert output.getvalue().startswith(b"the caf?")


def test_temperature_0_takes_the_likeliest_word_whatever_the_seed(model, capsys):
    greedy = [written(capsys, str(model), "the cat", "--temperature", "0", "--seed", seed) for seed in "12"]
    assert greedy[0] == greedy[1]


def test_a_small_top_p_leaves_only_the_likeliest_word(model, capsys):
    greedy = written(capsys, str(model), "the dog", "--temperature", "0", "--length", "9")
    assert written(capsys, str(model), "the dog", "--top-p", "1e-6", "--length", "9") == greedy


def test_a_prompt_is_read_from_a_pipe(model, capsys, monkeypatch):
    given = written(capsys, str(model), "under the sun", "--seed", "1", "--length", "8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("under the sun"))
    assert written(capsys, str(model), "--seed", "1", "--length", "8") == given


def test_chat_shows_the_answer_without_the_template(model, capsys):
    answer = written(capsys, str(model), "hello", "--chat", "--temperature", "0", "--length", "8")
    assert "<user>" not in answer
    assert not answer.startswith("hello")


def test_a_conversation_at_a_terminal_remembers_what_was_said(model, capsys, monkeypatch):
    from apollo_optim.evaluation.generation import TextWriter

    heard = []
    answer = TextWriter.answer
    monkeypatch.setattr(TextWriter, "answer", lambda self, said: heard.append(list(said)) or answer(self, said))
    monkeypatch.setattr(sys, "stdin", Terminal("hello\n\nand you?\n"))
    written(capsys, str(model), "--chat", "--length", "4", "--temperature", "0")
    assert [[each["role"] for each in said] for said in heard] == [["user"], ["user", "assistant", "user"]]
    assert [said[-1]["content"] for said in heard] == ["hello", "and you?"]


def test_at_a_terminal_every_line_goes_on(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal("the cat\nthe dog\n"))
    shown = written(capsys, str(model), "--length", "4", "--temperature", "0")
    assert [line for line in shown.split("> ") if line.startswith(("the cat", "the dog"))] == shown.split("> ")[1:3]


def test_without_a_chat_template_there_is_no_chat(tmp_path, capsys):
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert main(["write", str(folder), "hello", "--chat", "--device", "cpu"]) == 2
    assert "has no chat template; leave --chat out" in capsys.readouterr().err


def test_no_more_is_written_than_the_model_has_positions(model, capsys):
    long = " ".join(["the"] * 500)
    assert written(capsys, str(model), long, "--length", "100", "--temperature", "0").startswith(long)
    assert main(["write", str(model), " ".join(["the"] * 600), "--device", "cpu"]) == 2
    assert "the prompt is 600 tokens, and the model takes 1 to 511" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nowhere", "a"], "MODEL 'nowhere' is not there; accepted is the folder of a finished run"),
        (["MODEL", "a", "--length", "0"], "--length must be at least 1 token, got 0"),
        (["MODEL", "a", "--temperature", "-1"], "--temperature must be a number from 0 up, got -1.0"),
        (["MODEL", "a", "--top-p", "0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["MODEL", "a", "--seed", str(2**70)], f"--seed must be an integer in [0, 2**63), got {2**70}"),
        (
            ["~nosuchuser/a", "a"],
            "MODEL must be a name or a path (~user only where this machine has that user), got ~nosuchuser/a",
        ),
        (["MODEL", " "], "PROMPT is empty"),
        (["MODEL", "caf\udce9"], r"PROMPT must be UTF-8, got 'caf\udce9'"),
        (["MODEL", "a", "b"], "'b' follows no option that takes it"),
        ([], "MODEL is missing"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_is_loaded(flags, said, model, monkeypatch, capsys):
    monkeypatch.setattr("apollo_optim.evaluation.model.loaded_model", lambda *_: pytest.fail("loaded"))
    assert main(["write", *(str(model) if each == "MODEL" else each for each in flags)]) == 2
    assert said in capsys.readouterr().err


def test_help_shows_that_the_prompt_may_be_left_out(capsys):
    assert main(["write", "--help"]) == 0
    assert "usage: apollo write MODEL [PROMPT] [options]" in capsys.readouterr().out


def test_a_gguf_file_is_converted_once(capsys, tmp_path, monkeypatch):
    from apollo_optim.train.tuning import base_model

    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = written(capsys, str(tmp_path / "tiny.gguf"), "the cat", "--length", "8", "--seed", "3")
    with monkeypatch.context() as patch:
        patch.setattr(base_model, "_read_gguf", lambda *_: pytest.fail("converted again"))
        assert written(capsys, str(tmp_path / "tiny.gguf"), "the cat", "--length", "8", "--seed", "3") == first
        (tmp_path / "text.txt").write_text("the cat is red. " * 100)
        measured = "--data", str(tmp_path / "text.txt"), "--sequence", "16", "--device", "cpu"
        assert main(["eval", str(tmp_path / "tiny.gguf"), *measured]) == 0
        assert "perplexity" in capsys.readouterr().out
    (tmp_path / "tiny.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:2000])
    assert main(["write", str(tmp_path / "tiny.gguf"), "the cat", "--device", "cpu"]) == 2
    assert "tiny.gguf cannot be read as GGUF" in capsys.readouterr().err
