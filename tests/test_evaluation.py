"""`apollo eval --tasks`: questions and likelihoods are lm-eval's, batches change nothing, what is killed goes on."""

import json
import random
from functools import wraps
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from apollo_optim.cli import main
from apollo_optim.evaluation import evaluate, likelihood
from apollo_optim.evaluation.documents import documents
from apollo_optim.evaluation.generation import answered, prompted, written_answers
from apollo_optim.evaluation.likelihood import batches, encoded, log_likelihoods
from apollo_optim.evaluation.model import ModelPlace, loaded_model, place_of, token_ids
from apollo_optim.evaluation.report import averages, judged, mean_with_error, summed_up
from apollo_optim.evaluation.tasks import COMMONSENSE, MMLU, MMLU_CATEGORIES, TASKS, ZERO_SHOT, MultipleChoice
from apollo_optim.train.tuning.conversations import conversation, prompts_by_style
from questions import MAKES, SUBJECTS, make_documents, make_model, write

LM_EVAL_FILES = {
    "boolq": "super_glue/boolq/default", "rte": "glue/rte/default", "hellaswag": "hellaswag/hellaswag",
    "winogrande": "winogrande/default", "openbookqa": "openbookqa/openbookqa", "arc_easy": "arc/arc_easy",
    "arc_challenge": "arc/arc_challenge", "piqa": "piqa/piqa", "sciq": "sciq/sciq", "mathqa": "mathqa/mathqa",
}  # fmt: skip
"""lm-eval's own definitions of the zero-shot tasks."""
ROUNDING = 2e-4
"""Of a log-likelihood in float32: some sixty terms of up to ten, each off by a few units of its last digit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_documents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def loaded(model):
    return loaded_model(place_of(str(model)), torch.device("cpu"), "fp32", trust_remote_code=False)


def evaluated(model: Path, data: Path, out: Path, *flags: str) -> int:
    return main(["eval", str(model), "--task-data", str(data), "--out", str(out), "--device", "cpu", *flags])


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def items(out: Path, task: str) -> list[dict]:
    (file,) = out.glob(f"{task}.*.jsonl")
    return in_order(file)


def in_order(file: Path) -> list[dict]:
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda line: line["item"])


@pytest.fixture(scope="module")
def ours(model, data, tmp_path_factory):
    """The folder that an evaluation of all tasks by likelihood leaves."""
    out = tmp_path_factory.mktemp("ours")
    assert evaluated(model, data, out, "--tasks", "zeroshot,mmlu,commonsense", "--by", "likelihood") == 0
    return out


@pytest.fixture(scope="module")
def theirs(loaded, data, tmp_path_factory):
    """What lm-eval finds by its own code on the same documents, one request at a time."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, definitions = tmp_path_factory.mktemp("theirs"), Path(lm_eval.__file__).parent / "tasks"
    for name, path in LM_EVAL_FILES.items():
        splits = {"test_split": None, "training_split": None, "validation_split": "validation"}
        local_task(folder, name, definitions / f"{path}.yaml", {"validation": data / f"zeroshot/{name}.jsonl"}, splits)
    for subject in SUBJECTS:
        files = {}
        for split in ("dev", "test"):
            docs = [doc for doc in documents(data / f"mmlu/{split}.jsonl") if doc["subject"] == subject]
            files[split] = folder / f"{subject}-{split}.jsonl"
            write(files[split], docs)
        local_task(folder, subject, definitions / f"mmlu/default/mmlu_{subject}.yaml", files, {"num_fewshot": 5})
    model, tokenizer = loaded
    return lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=[f"local_{name}" for name in (*LM_EVAL_FILES, *SUBJECTS)],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=1,
    )


def local_task(folder: Path, name: str, definition: Path, files: dict[str, Path], more: dict) -> None:
    """A task that is lm-eval's but for where its documents are."""
    kwargs = {"data_files": {split: str(file) for split, file in files.items()}, "cache_dir": str(folder / "cache")}
    own = {"include": str(definition), "task": f"local_{name}", "dataset_path": "json", "dataset_name": None}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**own, "dataset_kwargs": kwargs, **more}))


def samples(found: dict, name: str) -> list[dict]:
    return sorted(found["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("task", ZERO_SHOT, ids=lambda task: task.name)
def test_a_zero_shot_task_is_lm_evals_to_the_item(task, ours, theirs, data):
    expected = samples(theirs, task.name)
    for doc, sample in zip(documents(data / f"zeroshot/{task.name}.jsonl"), expected, strict=True):
        assert [tuple(each) for each in sample["arguments"]] == list(task.question(doc).requests)
    check_items(items(ours, task.name), expected, task.normed)
    scores, reported = results(ours)["tasks"][task.name], theirs["results"][f"local_{task.name}"]
    for metric in ("acc", "acc_norm") if task.normed else ("acc",):
        assert scores[metric] == pytest.approx(reported[f"{metric},none"])
        assert scores[f"{metric}_stderr"] == pytest.approx(reported[f"{metric}_stderr,none"])
    assert task.normed == ("acc_norm,none" in reported)


def check_items(found: list[dict], expected: list[dict], normed: bool) -> None:
    for item, sample in zip(found, expected, strict=True):
        theirs = [likelihood for likelihood, _ in sample["filtered_resps"]]
        assert item["log_likelihoods"] == pytest.approx(theirs, abs=ROUNDING)
        assert item["acc"] == sample["acc"]
        assert not normed or item["acc_norm"] == sample["acc_norm"]


def test_mmlu_is_lm_evals_to_the_item(ours, theirs, data):
    docs, found = documents(data / "mmlu/test.jsonl"), items(ours, "mmlu")
    assert [doc["subject"] for doc in docs] == sorted((doc["subject"] for doc in docs), key=SUBJECTS.index)
    for subject in SUBJECTS:
        some = [item for item, doc in zip(found, docs, strict=True) if doc["subject"] == subject]
        check_items(some, samples(theirs, subject), normed=False)


def test_some_questions_were_longer_than_the_model_reads(data, loaded):
    """Otherwise the comparison above would say nothing about how they are cut."""
    _, tokenizer = loaded
    longest = max(len(tokenizer(json.dumps(doc))["input_ids"]) for doc in documents(data / "mmlu/dev.jsonl"))
    assert 6 * longest > 512


def test_mmlu_has_57_subjects_and_each_category_weighs_its_questions():
    assert [len(subjects) for subjects in MMLU_CATEGORIES.values()] == [19, 12, 13, 13]
    subjects = ["anatomy", "anatomy", "anatomy", "virology"]
    found = summed_up(MMLU, [{"acc": 1}, {"acc": 1}, {"acc": 0}, {"acc": 0}], subjects)
    assert found["acc"] == 0.5
    assert {name: part["acc"] for name, part in found["parts"].items()} == {"STEM": 2 / 3, "other": 0.0}
    assert found["subjects"]["anatomy"]["items"] == 3


def test_a_limit_counts_by_subject(model, data, tmp_path):
    assert evaluated(model, data, tmp_path, "--tasks", "mmlu,piqa", "--limit", "2", "--shots", "1") == 0
    tasks = results(tmp_path)["tasks"]
    assert tasks["piqa"]["items"] == 2
    assert {subject: scores["items"] for subject, scores in tasks["mmlu"]["subjects"].items()} == dict.fromkeys(
        SUBJECTS, 2
    )


def test_local_forms_of_documents_ask_what_the_hubs_do():
    """Of HellaSwag with one field for the context, MathQA as instructions, BoolQ with its answer as a word."""
    begun, rest = "A man sits on a roof. He looks.", "the sun"
    whole = {"activity_label": "Roofs", "endings": ["a", "b"], "label": "1"}
    hub = TASKS["hellaswag"].question({**whole, "ctx_a": begun, "ctx_b": rest})
    assert TASKS["hellaswag"].question({**whole, "ctx": f"{begun} {rest}"}) == hub
    assert hub.requests[1] == ("Roofs: A man sits on a roof. He looks. The sun", " b")
    wikihow = "[header] How to sit [title] Choose a roof. [step] It is flat. Then sit"
    hub = TASKS["hellaswag"].question({**whole, "ctx_a": wikihow, "ctx_b": ""})
    assert TASKS["hellaswag"].question({**whole, "ctx": wikihow}) == hub
    options = "a ) 38 , b ) none of these , c ) 1 , 000 , d ) 5 , e ) 6"
    hub = TASKS["mathqa"].question({"Problem": "what is it ?", "options": options, "correct": "b"})
    asked = f"what is it ? The options: {options.replace('a', 'A').replace('b', 'B').replace('e', 'E')}"
    assert TASKS["mathqa"].question({"instruction": asked, "answer": "B"}) == hub
    hub = TASKS["boolq"].question({"passage": "p", "question": "q", "label": 1})
    assert TASKS["boolq"].question({"passage": "p", "question": "q", "answer": True}) == hub


def test_a_padded_batch_scores_as_one_by_one(loaded, data):
    model, tokenizer = loaded
    task = TASKS["arc_easy"]
    asked = [task.question(doc) for doc in documents(data / "zeroshot/arc_easy.jsonl")]
    tokens = encoded(asked, tokenizer, 512, special=True)
    together = log_likelihoods(model, tokens)
    for item, found in zip(tokens, together, strict=True):
        alone = [log_likelihoods(model, [[each]])[0][0] for each in item]
        assert found == pytest.approx(alone, abs=ROUNDING)


def test_an_answer_of_one_token_is_read_off_the_text_before_it(loaded, monkeypatch):
    model, tokenizer = loaded
    asked = MultipleChoice((("the cat sees", " a"), ("the cat sees", " x")), 0, (1, 1))
    (item,) = encoded([asked], tokenizer, 512, special=True)
    rows = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **rest: rows.append(len(ids)) or forward(ids, **rest))
    (found,) = log_likelihoods(model, [item])
    assert item[0].scored == 1
    assert rows == [len({each.read for each in item})]
    assert len(found) == 2


def test_what_all_rows_begin_with_is_read_once(loaded, monkeypatch):
    model, tokenizer = loaded
    examples = "the old river sees a red stone because " * 8
    asked = [
        MultipleChoice(((examples + middle, " a cat"), (examples + middle, " the small moon")), 0, (5, 14))
        for middle in ("blue light", "a dog walks under the sun", "over")
    ]
    tokens = encoded(asked, tokenizer, 512, special=True)
    shapes, forward = [], model.forward
    noted = wraps(forward)(lambda ids, **rest: shapes.append(tuple(ids.shape)) or forward(ids, **rest))
    monkeypatch.setattr(model, "forward", noted)
    together = log_likelihoods(model, tokens)
    (once, prefix), (rows, rest) = shapes
    assert (once, rows) == (1, 6)
    assert prefix > 32 > rest
    monkeypatch.setattr(likelihood, "LEAST_SHARED", 1000)
    apart = log_likelihoods(model, tokens)
    assert len(shapes) == 3
    assert [each for item in together for each in item] == pytest.approx(
        [each for item in apart for each in item], abs=ROUNDING
    )


def test_a_text_to_go_on_with_is_not_ended_by_the_tokenizer(model):
    """T5's, the paper's, would end the question before its answer; the token that begins a text is not doubled."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    bare = token_ids(tokenizer, ["the cat", "a"], special=True)
    end = tokenizer.eos_token_id
    for single, begin in (("$A <|endoftext|>", []), ("<|endoftext|> $A <|endoftext|>", [end])):
        added = TemplateProcessing(single=single, special_tokens=[("<|endoftext|>", end)])
        tokenizer.backend_tokenizer.post_processor = added
        assert tokenizer("a")["input_ids"][-1] == end
        assert token_ids(tokenizer, ["the cat", "a"], special=True) == [begin + ids for ids in bare]
        assert token_ids(tokenizer, ["the cat", "a"], special=False) == bare
        assert token_ids(tokenizer, ["<|endoftext|>a"], special=True) == [[end, *bare[1]]]


def test_batches_hold_every_item_once_and_no_more_tokens_than_asked():
    lengths = [[5, 7], [3], [40, 2, 1], [7], [7, 7, 7], [1]]
    found = list(batches(lengths, 28))
    assert sorted(item for batch in found for item in batch) == list(range(6))
    for batch in found:
        padded = sum(len(lengths[item]) for item in batch) * max(max(lengths[item]) for item in batch)
        assert padded <= 28 or len(batch) == 1
    longest = [max(lengths[item]) for batch in found for item in batch]
    assert longest == sorted(longest, reverse=True)
    apart = list(batches(lengths, 1000, ["a", "b", "a", "b", "a", "b"]))
    assert [sorted(batch) for batch in apart] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("beams", [1, 4])
def test_a_padded_batch_writes_as_one_by_one(loaded, data, beams):
    model, tokenizer = loaded
    docs = documents(data / "commonsense/test/winogrande.jsonl")
    prompts = [prompted(doc["instruction"], "alpaca", tokenizer) for doc in docs]
    assert len({len(tokenizer(prompt)["input_ids"]) for prompt in prompts}) > 1
    together = written_answers(model, tokenizer, prompts, special=True, beams=beams)
    assert together == [written_answers(model, tokenizer, [each], True, beams)[0] for each in prompts]
    assert all(together)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the correct answer is answer3", "answer3"),
        (" answer2, and not answer3", "answer2"),
        ("Answer3", None),
        ("the third", None),
        ("", None),
    ],
)
def test_the_first_of_the_tasks_words_is_the_answer(text, found):
    task = TASKS["commonsense_siqa"]
    asked = MultipleChoice(tuple(("?", f"the correct answer is answer{n}") for n in (1, 2, 3)), 2, (7, 7, 7))
    assert answered(asked, task, text) == {
        "text": text,
        "found": found,
        "answer": "answer3",
        "acc": int(found == "answer3"),
    }


def test_prompts_are_put_in_the_style_that_was_asked_for(loaded):
    _, tokenizer = loaded
    assert prompted("Why?", "chat", tokenizer) == "<user>Why?\n<assistant>"
    assert prompted("Why?", "alpaca", tokenizer) == prompts_by_style("Why?")["alpaca"]
    assert prompted("Why?", "alpaca", tokenizer).endswith("\n\n### Instruction:\nWhy?\n\n### Response:\n")
    for style in ("alpaca", "plain"):
        learned_after = conversation({"instruction": "Why?", "output": "So."}).prompts[style]
        assert prompted("Why?", style, tokenizer) == learned_after


def test_standard_errors_and_averages_by_hand():
    assert mean_with_error([1, 0, 0, 1], "acc") == {"acc": 0.5, "acc_stderr": pytest.approx((1 / 3 / 4) ** 0.5)}
    assert mean_with_error([1], "acc") == {"acc": 1.0, "acc_stderr": None}
    tasks = {task.name: {"items": 2, "acc": 0.25, "acc_stderr": 0.1} for task in ZERO_SHOT}
    tasks["piqa"] |= {"acc_norm": 0.75, "acc_norm_stderr": 0.2}
    found = averages(tasks, ["zeroshot"])["zeroshot"]
    assert (found["acc"], found["acc_norm"]) == (pytest.approx(0.25), pytest.approx(0.3))
    assert found["acc_stderr"] == pytest.approx(0.1 * 10**0.5 / 10)


def test_of_equal_likelihoods_the_first_is_chosen_and_lengths_decide_the_norm():
    asked = MultipleChoice((("?", " a"), ("?", " bbbb")), 1, (1, 4))
    assert judged(asked, [-2.0, -2.0]) | {"log_likelihoods": None} == {
        "log_likelihoods": None,
        "answer": 1,
        "acc": 0,
        "acc_norm": 1,
    }


def test_the_table_has_every_task_and_the_averages(model, data, ours, capsys):
    assert evaluated(model, data, ours, "--tasks", "zeroshot,mmlu,commonsense", "--by", "likelihood") == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    first = [line[0] for line in lines]
    assert first[1:11] == [task.name for task in ZERO_SHOT]
    assert first[11:16] == ["mmlu", "STEM", "social", "humanities", "other"]
    assert first[16:24] == [task.name for task in COMMONSENSE]
    assert [line[:2] for line in lines[24:]] == [["zeroshot", "average"], ["commonsense", "average"]]
    assert printed.err.count("done before") == 19  # nothing is evaluated twice
    assert evaluated(model, data, ours, "--tasks", "piqa", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["piqa"]["items"] == 5


def test_written_answers_are_kept_with_their_texts(model, data, tmp_path, capsys):
    flags = "--tasks", "commonsense_boolq,commonsense_piqa", "--beams", "1", "--limit", "3"
    assert evaluated(model, data, tmp_path, *flags) == 0
    found = items(tmp_path, "commonsense_boolq")
    assert len(found) == 3
    assert all(item["text"] and item["found"] in ("true", "false", None) for item in found)
    assert results(tmp_path)["tasks"]["commonsense_boolq"]["unanswered"] == sum(not item["found"] for item in found)
    assert "unanswered" in capsys.readouterr().out
    # Another way to ask is another result, kept beside the first.
    assert evaluated(model, data, tmp_path, *flags, "--prompt", "plain") == 0
    assert len(list(tmp_path.glob("commonsense_boolq.*.jsonl"))) == 2


def test_a_killed_evaluation_goes_on_where_it_was(model, data, tmp_path, monkeypatch):
    flags = "--tasks", "hellaswag,piqa", "--batch-tokens", "64"
    assert evaluated(model, data, tmp_path / "whole", *flags) == 0
    calls = []

    def until_third(model, some):
        calls.append(len(some))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return log_likelihoods(model, some)

    monkeypatch.setattr(evaluate, "log_likelihoods", until_third)
    assert evaluated(model, data, tmp_path / "killed", *flags) == 130
    (file,) = (tmp_path / "killed").glob("hellaswag.*.jsonl")
    done = file.read_text()
    assert len(done.splitlines()) == sum(calls[:2])
    file.write_text(done + '{"item": 4, "log_like')  # as a power cut leaves it
    assert evaluated(model, data, tmp_path / "killed", *flags) == 0
    assert file.read_text().startswith(done)
    assert sum(calls[3:]) == 10 - sum(calls[:2])
    for name in ("hellaswag", "piqa"):
        assert items(tmp_path / "killed", name) == items(tmp_path / "whole", name)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_another_model_in_the_same_place_is_evaluated_anew(data, tmp_path, capsys):
    folder = make_model(tmp_path / "model")
    for seen in (0, 1, 0):
        capsys.readouterr()
        assert evaluated(folder, data, tmp_path / "out", "--tasks", "piqa", "--limit", "2") == 0
        assert capsys.readouterr().err.count("done before") == seen
        if seen:
            make_model(folder, seed=1)
    first, second = (in_order(file) for file in (tmp_path / "out").glob("piqa.*.jsonl"))
    assert first != second


def test_models_are_found_by_every_name(tmp_path, monkeypatch):
    run, gguf = tmp_path / "run", tmp_path / "tiny.gguf"
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").touch()
    with pytest.raises(ValueError, match="has no model yet: it is exported when the run ends"):
        place_of(str(run))
    (run / "run.json").write_text('{"result": {"steps": 3}}')
    with pytest.raises(ValueError, match="has no model yet"):  # its export may have failed
        place_of(str(run))
    (tmp_path / "sweep.json").touch()
    with pytest.raises(ValueError, match=f"only the best one's is kept, {tmp_path}/model$"):
        place_of(str(run))
    (run / "run.json").write_text('{"diverged": true}')
    with pytest.raises(ValueError, match="has no model: the run diverged"):
        place_of(str(run))
    (run / "model" / "config.json").touch()
    assert place_of(str(run)) == ModelPlace(str(run / "model"), run=run)
    assert place_of(str(run / "model")) == ModelPlace(str(run / "model"))
    gguf.touch()
    assert place_of(str(gguf)) == ModelPlace(str(tmp_path), gguf="tiny.gguf")
    assert place_of("org/name") == ModelPlace("org/name")
    monkeypatch.chdir(tmp_path)
    assert place_of("run/nothing") == ModelPlace("run/nothing"), "an organisation may be called as a folder here"
    for name, said in (
        ("nowhere", "is not there"),
        ("run/model/nothing", "is not there"),
        (str(tmp_path), "neither"),
        (str(run / "config.yaml"), "must end"),
    ):
        with pytest.raises(ValueError, match=rf"MODEL .*{said}.*accepted is the folder of a finished run"):
            place_of(name)
    monkeypatch.setattr("apollo_optim.evaluation.model.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reading \.gguf files needs gguf: pip install gguf"):
        place_of(str(gguf))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_are_loaded_with_the_model_that_they_are_for(model, loaded, tmp_path, dora):
    peft = pytest.importorskip("peft")
    base, tokenizer = loaded_model(place_of(str(model)), torch.device("cpu"), "fp32", trust_remote_code=False)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, use_dora=dora)
    adapted = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "magnitude" in name:
                weight *= 1.5
    adapted.save_pretrained(tmp_path / "adapters")
    tokenizer.save_pretrained(tmp_path / "adapters")
    tuned, _ = loaded_model(place_of(str(tmp_path / "adapters")), torch.device("cpu"), "fp32", trust_remote_code=False)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(tuned(ids).logits, adapted(ids).logits)
    assert not torch.allclose(tuned(ids).logits, loaded[0](ids).logits)
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    save_file({f"other.{name}": weight for name, weight in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=rf"MODEL {tmp_path}/adapters cannot be loaded .*missing adapter keys"):
        loaded_model(place_of(str(tmp_path / "adapters")), torch.device("cpu"), "fp32", trust_remote_code=False)


@pytest.mark.cuda
def test_a_gpu_scores_and_writes_as_the_cpu_does(model, loaded, data):
    there, tokenizer = loaded_model(place_of(str(model)), torch.device("cuda"), "fp32", trust_remote_code=False)
    here, _ = loaded
    asked = [TASKS["piqa"].question(doc) for doc in documents(data / "zeroshot/piqa.jsonl")]
    tokens = encoded(asked, tokenizer, 512, special=True)
    for found, expected in zip(log_likelihoods(there, tokens), log_likelihoods(here, tokens), strict=True):
        assert found == pytest.approx(expected, abs=1e-2)  # products may be in TF32 there
    written = written_answers(there, tokenizer, ["the cat", "a dog sees the"], special=True, beams=4)
    assert all(written)


def test_a_task_of_lm_eval_is_found_in_the_folder_and_run_by_it(model, data, tmp_path, capsys):
    lm_eval = pytest.importorskip("lm_eval")
    definition = Path(lm_eval.__file__).parent / "tasks" / "piqa" / "piqa.yaml"
    files = {"validation": data / "zeroshot/piqa.jsonl"}
    local_task(tmp_path, "piqa", definition, files, {"training_split": None})
    flags = "--tasks", "local_piqa,piqa", "--limit", "4"
    write(tmp_path / "piqa.jsonl", documents(data / "zeroshot/piqa.jsonl"))
    assert evaluated(model, tmp_path, tmp_path / "out", *flags) == 0
    tasks = results(tmp_path / "out")["tasks"]
    assert tasks["local_piqa"] == pytest.approx(tasks["piqa"])
    assert tasks["piqa"]["items"] == 4
    capsys.readouterr()
    assert evaluated(model, tmp_path, tmp_path / "out", *flags) == 0
    said = capsys.readouterr().err  # what lm-eval reads there may have changed
    assert "piqa: done before" in said
    assert "local_piqa: by lm-eval" in said


def test_a_task_whose_documents_cannot_be_fetched_says_how_to_run_it_on_local_ones(
    model, data, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("lm_eval")
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: org/far\ntest_split: test\n")

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'org/far' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    assert evaluated(model, tmp_path, tmp_path / "out", "--tasks", "far") == 2
    said = capsys.readouterr().err
    assert "--tasks far: lm-eval cannot get or run it (ConnectionError: Couldn't reach 'org/far' on the Hub)" in said
    assert "put a YAML file into --task-data" in said


@pytest.mark.slow
def test_a_name_that_nobody_knows_is_answered_with_the_nearest_before_lm_eval_reads_its_tasks(
    model, data, tmp_path, capsys, monkeypatch
):
    harness = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(harness, "TaskManager", None)  # asking it takes a quarter of a minute
    assert evaluated(model, data, tmp_path, "--tasks", "lambada_openaj") == 2
    assert "did you mean 'lambada_openai'?" in capsys.readouterr().err


def test_a_word_of_lm_evals_files_that_is_no_task_is_unknown(model, data, tmp_path, capsys, monkeypatch):
    harness = pytest.importorskip("lm_eval.tasks")
    whole = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: whole(None, include_defaults=False))
    assert evaluated(model, data, tmp_path, "--tasks", "doc_to_text") == 2
    assert "'doc_to_text' is unknown" in capsys.readouterr().err


def test_libraries_show_no_bars_of_their_own(model, data, tmp_path, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    assert evaluated(model, data, tmp_path, "--tasks", "piqa", "--limit", "1") == 0
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize("ending", [".json", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_documents_are_read_in_every_form(ending, tmp_path):
    import gzip

    import pyarrow as arrow
    from pyarrow import parquet

    docs = [{"goal": "g", "sol1": "a", "sol2": "b", "label": number % 2} for number in range(3)]
    path, lines = tmp_path / f"piqa{ending}", "".join(json.dumps(doc) + "\n" for doc in docs).encode()
    if ending == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(docs), path)
    else:
        packed = {".json": json.dumps(docs).encode(), ".jsonl.gz": gzip.compress(lines)}
        path.write_bytes(packed[ending] if ending in packed else arrow.compress(lines, "zstd", asbytes=True))
    assert documents(path) == docs
    assert documents(path, limit=2) == docs[:2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "hellaswagg"], "'hellaswagg' is unknown; did you mean 'hellaswag'?"),
        (["--tasks", "piqa", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "mmlu", "--shots", "6"], "--shots must be 0 to 5 (as many examples as MMLU has), got 6"),
        (["--tasks", "piqa", "--shots", "2"], "--shots 2 has no effect without --tasks mmlu"),
        (["--tasks", "piqa", "--by", "likelihood"], "--by likelihood has no effect without --tasks commonsense"),
        (["--tasks", "commonsense", "--by", "likelihood", "--beams", "2"], "--beams 2 has no effect with --by"),
        (["--tasks", "piqa", "--data", "text.txt"], "--data text.txt has no effect with --tasks"),
        (["--tasks", ","], "--tasks ',' names no task"),
        (["--limit", "3"], "--task-data"),
        (["--tasks", "piqa", "--by", "luck"], "--by 'luck' is unknown"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(flags, said, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)  # lm-eval takes half a minute to list its tasks
    monkeypatch.setattr(evaluate, "loaded_model", lambda *_: pytest.fail("loaded"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert evaluated(folder, data, tmp_path / "out", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_documents_and_missing_files_are_named(model, tmp_path, capsys):
    def said(*flags: str) -> str:
        assert evaluated(model, tmp_path, tmp_path / "out", *flags) == 2
        return capsys.readouterr().err

    assert "has no documents of piqa: looked for piqa and zeroshot/piqa" in said("--tasks", "piqa")
    good = MAKES["piqa"](random.Random(0))
    write(tmp_path / "piqa.jsonl", [good, {"goal": "g", "sol1": "a", "label": 0}])
    assert "document 2 is no question of this task: it has no field 'sol2'" in said("--tasks", "piqa")
    (tmp_path / "piqa.jsonl").write_text('{"goal": \n')
    assert "piqa.jsonl, line 1 is not JSON" in said("--tasks", "piqa")
    write(tmp_path / "test.jsonl", [{"subject": "astrology", "question": "q", "choices": list("abcd"), "answer": 0}])
    assert "'astrology' is no subject of MMLU; did you mean" in said("--tasks", "mmlu", "--shots", "0")
    write(tmp_path / "piqa.jsonl", [good])
    (tmp_path / "out").write_text("a file")
    assert f"--out {tmp_path / 'out'} cannot be written to" in said("--tasks", "piqa")
    assert main(["eval", str(tmp_path), "--tasks", "piqa"]) == 2
    assert f"MODEL {tmp_path}: neither" in capsys.readouterr().err
    assert main(["eval"]) == 2
    assert "MODEL is missing: Folder of a finished run" in capsys.readouterr().err
