"""Instruction data: every schema and format, only answers learned, and no example sees another."""

import gzip
import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

from apollo_optim.train.data.tokenizer import Tokenizer
from apollo_optim.train.display import Display
from apollo_optim.train.loop import uncompiled
from apollo_optim.train.losses import IGNORED, Objective
from apollo_optim.train.model import Model
from apollo_optim.train.model import objective as objective_of
from apollo_optim.train.tuning.answers import AnswerEncoder, BadExamples, answer_set
from apollo_optim.train.tuning.batches import (
    AnswerRows,
    by_length,
    grouped_order,
    packs,
    sees_others,
    shuffled_order,
)
from apollo_optim.train.tuning.conversations import (
    BadExampleError,
    Located,
    conversation,
    located_records,
    prompts_by_style,
)
from apollo_optim.train.tuning.examples import encoded_once
from finetuning import CHATML, MARKED, questions, tiny_model, tiny_tokenizer, write_lines

MESSAGES = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the egg is red. which colour?"},
        {"role": "assistant", "content": "it is red"},
        {"role": "user", "content": "and the cat?"},
        {"role": "assistant", "content": "it is blue"},
    ]
}
QUESTION = {"instruction": "which colour is the egg?", "input": "the egg is red.", "output": "it is red"}


def encoder(template, style, longest=200):
    return AnswerEncoder(Tokenizer(tiny_tokenizer(template), "tiny"), style, longest)


def encoded(records, template=CHATML, style="chat", longest=200):
    """The examples, and what was bad of them."""
    bad = BadExamples()
    located = [Located("a.jsonl", number, "a", record) for number, record in enumerate(records, 1)]
    return answer_set(encoder(template, style, longest).encoded(located, bad)), bad


def learned_text(answers, number, template=CHATML):
    """What is learned of an example, decoded."""
    ids, learned = answers.example(number)
    return tiny_tokenizer(template).decode(ids[learned])


def examples(count=8, template=CHATML, style="chat"):
    return encoded(questions(count), template, style)[0]


@pytest.mark.parametrize(
    ("record", "learned"),
    [
        (QUESTION, "it is red<|im_end|>\n"),
        ({"instruction": "which colour?", "answer": "red"}, "red<|im_end|>\n"),
        ({"prompt": "which colour?", "completion": "red"}, "red<|im_end|>\n"),
        (
            {
                "prompt": [{"role": "user", "content": "which colour?"}],
                "completion": [{"role": "assistant", "content": "red"}],
            },
            "red<|im_end|>\n",
        ),
        (MESSAGES, "it is red<|im_end|>\nit is blue<|im_end|>\n"),
    ],
    ids=["instruction", "answer", "completion", "completion-messages", "messages"],
)
def test_of_every_schema_the_answers_are_learned(record, learned):
    answers, bad = encoded([record])
    assert learned_text(answers, 0) == learned
    assert bad.total == 0


def test_a_template_with_marks_says_itself_what_is_learned():
    answers, _ = encoded([MESSAGES], MARKED)
    assert learned_text(answers, 0) == "it is red<|im_end|>it is blue<|im_end|>"
    # But for what is learned, both templates are one.
    np.testing.assert_array_equal(answers.tokens, encoded([MESSAGES], CHATML)[0].tokens)


def test_of_a_template_that_marks_nothing_there_is_no_answer():
    answers, bad = encoded([QUESTION], MARKED.replace("'assistant'", "'model'"))
    assert len(answers) == 0
    assert dict(bad.counts) == {"no answer": 1}


REWRITING = CHATML.replace("message['content']", "(message['content'] if loop.last else 'said')")


@pytest.mark.slow
def test_a_template_that_rewrites_earlier_answers_gets_its_marks_from_trl():
    templates = pytest.importorskip("trl.chat_template_utils")
    answers, bad = encoded([MESSAGES], templates.qwen3_chat_template)
    assert bad.total == 0
    assert "it is red<|im_end|>" in learned_text(answers, 0)
    assert "it is blue<|im_end|>" in learned_text(answers, 0)
    assert "colour" not in learned_text(answers, 0)
    assert "brief" not in learned_text(answers, 0)
    with pytest.raises(ValueError, match="--chat-template"):
        encoded([MESSAGES], REWRITING)


def test_a_template_that_rewrites_earlier_answers_is_refused_where_nothing_knows_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    with pytest.raises(ValueError, match="--chat-template"):
        encoded([MESSAGES], REWRITING)


@pytest.mark.parametrize(
    ("template", "why"),
    [("{% for message in messages %}", "end of template"), ("{{ 1 / 0 }}", "division"), ("{{ messages + 1 }}", "int")],
)
def test_a_template_that_fails_is_refused_with_the_reason(template, why):
    with pytest.raises(ValueError, match=f"{why}.*--chat-template"):
        encoded([QUESTION], template)


def test_messages_that_begin_with_the_assistant_are_left_out_unless_the_template_marks_them():
    greeted = {"messages": [{"role": "assistant", "content": "it is red"}, *MESSAGES["messages"][1:]]}
    answers, bad = encoded([greeted, QUESTION])
    assert len(answers) == 1
    assert "a.jsonl:1: messages that begin with the assistant" in str(bad)
    answers, bad = encoded([greeted], MARKED)
    assert bad.total == 0
    assert learned_text(answers, 0).startswith("it is red<|im_end|>it is red")


@pytest.mark.parametrize("style", ["chat", "alpaca"])
def test_half_a_character_makes_a_bad_example(style):
    halved = json.loads(r'{"instruction": "which colour?", "output": "it is \ud83d"}')
    answers, bad = encoded([QUESTION, halved, QUESTION], CHATML, style)
    assert len(answers) == 2
    assert r"a.jsonl:2: half of a character, which no tokenizer takes: '\ud83d'" in str(bad)


def test_without_a_template_alpacas_prompt_is_used_and_the_end_is_learned():
    answers, _ = encoded([QUESTION], None, "alpaca")
    ids, learned = answers.example(0)
    tokenizer = tiny_tokenizer(None)
    assert tokenizer.decode(ids[~learned]) == prompts_by_style("which colour is the egg?", "the egg is red.")["alpaca"]
    assert tokenizer.decode(ids[learned]) == "it is red<|end|>"


def test_a_plain_prompt_is_nothing_but_the_prompt_and_several_turns_need_a_template():
    answers, bad = encoded([{"prompt": "red? ", "completion": "yes"}, QUESTION, MESSAGES], None, "plain")
    text = "red? yes<|end|>which colour is the egg?\n\nthe egg is red.\nit is red<|end|>"
    assert tiny_tokenizer(None).decode(answers.tokens) == text
    assert "a.jsonl:3: messages of several turns need a chat template" in str(bad)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"instruction": "which?", "output": ""}, "no answer"),
        ({"prompt": "which?", "completion": " "}, "no answer"),
        ({"messages": [{"role": "user", "content": "which?"}]}, "no answer"),
        ({"messages": [{"role": "user"}]}, "role and a content"),
        ({"messages": "which?"}, "must be a list"),
        ({"question": "which?", "reply": "this"}, "fields question, reply"),
        ({"instruction": 5, "output": "five"}, "must be text"),
        (["which?"], "not an object"),
    ],
)
def test_bad_examples_say_why(record, why):
    with pytest.raises(BadExampleError, match=why):
        conversation(record)


def test_bad_examples_are_counted_by_kind_and_shown_with_their_lines():
    long = QUESTION | {"input": "the egg is red. " * 50}
    _, bad = encoded([QUESTION, {"instruction": "?", "output": ""}, long, *[{"x": 1}] * 5], longest=60)
    assert dict(bad.counts) == {"no answer": 1, "too long": 1, "unknown schema": 5}
    shown = str(bad)
    assert "a.jsonl:2: no answer" in shown
    assert "a.jsonl:3: too long" in shown
    assert "--sequence takes at most 60" in shown
    assert shown.count("fields x") == 3


def test_lines_of_every_format_are_numbered(tmp_path):
    import pyarrow as pa
    from pyarrow import Table, parquet

    records = questions(5)
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json.zst").write_bytes(pa.compress(json.dumps(records, indent=1).encode(), "zstd", asbytes=True))
    parquet.write_table(Table.from_pylist(records), tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text(json.dumps(records) + "\n")  # a list on one line
    found = list(located_records("--data", str(tmp_path)))
    assert [each.record["instruction"] for each in found] == [each["instruction"] for each in records] * 5
    assert [each.number for each in found] == [1, 2, 3, 4, 5] * 2 + [2, 8, 14, 20, 26] + [1, 2, 3, 4, 5] * 2
    assert [each.source for each in found[::5]] == ["a", "b", "c", "d", "e"]


def test_a_list_that_breaks_off_and_a_line_that_is_no_json_are_found(tmp_path):
    (tmp_path / "a.json").write_text('[\n{"instruction": "?", "output": "!"},\n{"instruction": ')
    with pytest.raises(ValueError, match=r"a\.json:3"):
        list(located_records("--data", str(tmp_path / "a.json")))
    (tmp_path / "b.jsonl").write_text('{"instruction": "?", "output": "!"}\n\nnonsense\n')
    first, second = located_records("--data", str(tmp_path / "b.jsonl"))
    assert str(first).endswith("b.jsonl:1")
    assert str(second).endswith("b.jsonl:3")
    with pytest.raises(BadExampleError, match="not JSON"):
        conversation(second.record)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(ValueError, match="plain text"):
        list(located_records("--data", str(tmp_path / "c.txt")))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_list_is_known_behind_blanks_and_the_mark_of_an_editor(tmp_path, encoding):
    (tmp_path / "a.json").write_text("  \n" * 300_000 + json.dumps(questions(3)), encoding=encoding)
    found = list(located_records("--data", str(tmp_path / "a.json")))
    assert [each.record for each in found] == questions(3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[\n{"instruction": "?", "output": "!"}\n]\n[{"instruction": "?", "output": "!"}]', r"a\.json:3 ends a list"),
        (b'[\n{"instruction": "?", "output": "caf\xe9"}\n]', r"a\.json:2 is not UTF-8"),
    ],
)
def test_what_cannot_be_read_of_a_list_is_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(located_records("--data", str(tmp_path / "a.json")))


def test_a_dataset_of_the_hub_is_read_row_by_row(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    write_lines(tmp_path / "a.jsonl", questions(3))
    local = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: local)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **options: None)
    found = list(located_records("--data", "org/questions"))
    assert [str(each) for each in found] == ["org/questions:1", "org/questions:2", "org/questions:3"]
    assert found[0].record["output"] == questions(1)[0]["output"]


def test_a_dataset_that_was_saved_to_disk_is_read_row_by_row(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"messages": MESSAGES["messages"][:3]}, *({"messages": MESSAGES["messages"]} for _ in range(4))]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved", num_shards=2)
    found = list(located_records("--data", str(tmp_path / "saved")))
    assert [each.record for each in found] == records
    assert [(str(each).rpartition("/")[2], each.source) for each in found[2:4]] == [
        ("data-00000-of-00002.arrow:3", "data"),
        ("data-00001-of-00002.arrow:1", "data"),
    ]
    datasets.load_from_disk(tmp_path / "saved").map(lambda record: {"more": 1})
    assert [path.name[:6] for path in sorted((tmp_path / "saved").glob("*.arrow"))] == ["cache-", "data-0", "data-0"]
    assert [each.record for each in located_records("--data", str(tmp_path / "saved"))] == records


def test_splits_of_a_saved_dataset_are_not_mixed(tmp_path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(questions(4))
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"--data .* several splits.* of .*/test, .*/train"):
        list(located_records("--data", str(tmp_path)))
    assert len(list(located_records("--data", str(tmp_path / "train")))) == 4


def objective(kind="plain", model=None):
    return Objective(model or tiny_model(), kind)


def all_labels(tokens, labels, places, *_):
    """Labels of every place [rows, length], from those of some."""
    whole = torch.full((tokens.numel(),), IGNORED)
    learned = labels != IGNORED
    whole[places[learned]] = labels[learned]
    return whole.view_as(tokens)


@pytest.mark.parametrize("packed", [None, 256], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_only_answers_have_a_gradient(kind, packed):
    """The loss moves with the logits where an answer's token comes next, and nowhere else."""
    answers = examples(4)
    rows = AnswerRows(answers, by_length(answers.lengths), packed)
    loss_of = objective(kind)
    hidden = []
    loss_of.model.base_model.register_forward_hook(lambda module, inputs, output: hidden.append(output[0]))
    batch = rows.batch(0, 4)
    loss_of(*batch)
    (grad,) = torch.autograd.grad(loss_of(*batch), hidden[-1])
    has_gradient = grad.abs().sum(-1) > 0
    torch.testing.assert_close(has_gradient, all_labels(*batch) != IGNORED)
    assert int(has_gradient.sum()) == rows.targets(0, 4) == int(answers.learned.sum())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_example_of_a_packed_row_sees_another(implementation):
    """The loss of each example has no gradient in the embedded tokens of any other, nor of what fills the row."""
    answers = examples(6)
    rows = AnswerRows(answers, by_length(answers.lengths), 512)
    tokens, *learned, positions = rows.batch(0, 6)
    labels = all_labels(tokens, *learned)
    assert tokens.shape[0] == 1
    model = tiny_model()
    model.set_attn_implementation(implementation)
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits
    owner = (positions[0] == 0).cumsum(0) - 1
    for number in range(6):
        mine = owner == number
        own = torch.where(mine, labels[0], IGNORED)
        loss = torch.nn.functional.cross_entropy(logits[0], own, ignore_index=IGNORED)
        (grad,) = torch.autograd.grad(loss, embedded, retain_graph=True)
        seen = grad[0].abs().sum(-1) > 0
        assert seen[mine].any()
        assert not seen[~mine].any()


@pytest.mark.parametrize("packed", [None, 512], ids=["padded", "packed"])
def test_a_batch_is_as_its_examples_one_by_one(packed):
    """Loss and gradient of a batch are the sums over its examples, in float64 to rounding."""
    answers = examples(7)
    loss_of = objective("chunked", tiny_model().double())
    weights = list(loss_of.parameters())

    def sums(rows, calls):
        total = [torch.zeros_like(weight) for weight in weights]
        summed = 0.0
        for first, count in calls:
            loss = loss_of(*rows.batch(first, count)) * rows.targets(first, count)
            summed += loss.item()
            for place, grad in zip(total, torch.autograd.grad(loss, weights), strict=True):
                place += grad
        return summed, total

    order = shuffled_order(len(answers), 3)
    together = sums(AnswerRows(answers, order, packed), [(0, 7)])
    alone = sums(AnswerRows(answers, order, None), [(number, 1) for number in range(7)])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_marked_examples_come_with_the_places_where_they_begin():
    answers = examples(40)
    order = shuffled_order(len(answers), 3)
    *packed, positions = AnswerRows(answers, order, 256).batch(2, 30)
    *marked, starts = AnswerRows(answers, order, 256, marked=True).batch(2, 30)
    assert all(torch.equal(one, other) for one, other in zip((*packed, positions), marked, strict=True))
    begins = (positions.flatten() == 0).nonzero()[:, 0].tolist()
    assert len(begins) >= 30
    assert starts.tolist() == begins + [positions.numel()] * (len(starts) - len(begins))
    assert len(starts) > len(begins)


@pytest.mark.parametrize("packed", [None, 128], ids=["padded", "packed"])
def test_one_compilation_is_for_all_layers_and_batches_of_many_sizes(packed, monkeypatch):
    answers = examples(40)
    rows = AnswerRows(answers, by_length(answers.lengths), packed)
    batches = [rows.batch(first, count) for first, count in ((0, 6), (6, 8), (14, 26))]
    assert len({tuple(tokens.shape) for tokens, *_ in batches}) == 3
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, model = tiny_model(num_hidden_layers=3), tiny_model(num_hidden_layers=3)
    by_layer = objective_of(Model(compile=True), model, "cpu", tuning=True)
    for batch in batches:
        loss, expected = by_layer(*batch), Objective(plain)(*batch)
        grads, expected_grads = (
            torch.autograd.grad(value, list(each.parameters())) for value, each in ((loss, model), (expected, plain))
        )
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-7)
    assert len(compiled) == 1
    model.eval()
    with uncompiled():
        by_layer(*batches[0])
    assert len(compiled) == 1


def test_packs_hold_every_example_once_and_no_more_than_fits():
    lengths = np.array([30, 5, 60, 41, 17, 60, 2, 33])
    groups = packs(np.arange(8), lengths, 64)
    assert sorted(number for group in groups for number in group) == list(range(8))
    assert all(lengths[group].sum() <= 64 for group in groups)
    assert len(groups) == 4


class Encodings:
    """How often a place was encoded, and not read from the cache."""

    def __init__(self, monkeypatch, folder):
        self.count, self.cache, encode = 0, folder / "cache", AnswerEncoder.encoded

        def counting(*arguments):
            self.count += 1
            return encode(*arguments)

        monkeypatch.setattr(AnswerEncoder, "encoded", counting)

    def __call__(self, path, template=CHATML, style="chat", longest=200):
        with Display(quiet=True) as screen:
            return encoded_once("--data", str(path), encoder(template, style, longest), self.cache, screen)


def test_examples_are_encoded_once(monkeypatch, tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, [*questions(5), {"instruction": "?", "output": ""}])
    once = Encodings(monkeypatch, tmp_path)
    answers, bad = once(path)
    again, bad_again = once(path)
    assert once.count == 1
    assert (again.key, again.sources, str(bad_again)) == (answers.key, ["a"] * 5, str(bad))
    assert bad_again.total == 1


def test_whatever_decides_the_tokens_of_examples_has_them_encoded_anew(monkeypatch, tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, questions(5))
    once = Encodings(monkeypatch, tmp_path)
    ways = [{}, {"longest": 30}, {"style": "plain"}, {"style": "alpaca"}, {"template": MARKED}]
    found = [once(path, **way)[0].key for way in ways]
    assert once.count == len(ways)
    write_lines(path, [*questions(4), QUESTION])
    assert once(path)[0].key not in found
    assert once.count == len(ways) + 1


def test_a_damaged_cache_of_examples_is_made_anew(monkeypatch, tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, questions(5))
    once = Encodings(monkeypatch, tmp_path)
    answers, _ = once(path)
    (tokens,) = once.cache.glob("examples/*/tokens.npy")
    content = bytearray(tokens.read_bytes())
    content[-3] ^= 1
    tokens.write_bytes(content)
    again, _ = once(path)
    assert once.count == 2
    assert again.key == answers.key
    once(path)
    assert once.count == 2


@pytest.mark.parametrize("grouped", [False, True])
def test_an_epoch_reads_every_example_once(grouped):
    lengths = np.random.default_rng(0).integers(1, 99, 4 * 32 * 2)
    order = grouped_order(lengths, 4, seed=1) if grouped else shuffled_order(len(lengths), seed=1)
    first, second = order(np.arange(len(lengths))), order(np.arange(len(lengths), 2 * len(lengths)))
    assert sorted(first) == sorted(second) == list(range(len(lengths)))
    assert (first != second).any()
    spread = np.ptp(lengths[first].reshape(-1, 4), axis=1).mean()
    assert (spread < 5) == grouped


def test_a_model_that_makes_up_its_own_positions_is_found_to_mix_examples():
    device = torch.device("cpu")
    assert not sees_others(objective(), device, marked=False)

    class Deaf(torch.nn.Module):
        """An objective that does not listen to positions."""

        def __init__(self):
            super().__init__()
            self.inner = objective()

        def forward(self, tokens, labels, positions):
            return self.inner(tokens, labels)

    assert sees_others(Deaf(), device, marked=False)
