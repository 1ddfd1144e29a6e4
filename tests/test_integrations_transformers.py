"""The Trainer of transformers, and TRL's, train with our optimizers in one line, and resume as if never interrupted."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, APOLLOMini, Artemis, Fira, GaLore, StructuredAdamW, step_in_backward
from apollo_optim.quant import dequantize_weights_, quantize_weights_

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from apollo_optim.integrations.transformers import ApolloFactory, OptimizerStatistics  # noqa: E402

VOCABULARY, LENGTH = 64, 12


def llama(tied: bool = False) -> LlamaForCausalLM:
    """A tiny LLaMA, the same every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def texts(count: int = 64) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder, cls=TrainingArguments, **options):
    """Of six steps, saved every second one, with a schedule that depends on all of them."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return cls(**(defaults | options))


def trainer(folder, options, model=None, **given):
    return Trainer(
        llama() if model is None else model,
        arguments(folder, **given),
        train_dataset=texts(),
        optimizer_cls_and_kwargs=(ApolloFactory, options),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models are equal to the last bit, and not where they began."""
    ours, theirs = weights(first), weights(second)
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], llama().model.layers[0].mlp.up_proj.weight)
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


# The factory.


@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [("apollo", APOLLO), ("mini", APOLLOMini), ("Apollo_Mini", APOLLOMini), ("artemis", Artemis), ("galore", GaLore),
     ("fira", Fira), ("structured-adamw", StructuredAdamW)],
)  # fmt: skip
def test_a_variant_by_name_is_the_optimizer_over_the_model(variant, optimizer):
    model = llama(tied=True)
    built = ApolloFactory()(model, lr=0.01, weight_decay=0.1, variant=variant)
    by_hand = optimizer(model, lr=0.01, weight_decay=0.1)
    assert type(built) is optimizer
    assert built.defaults == by_hand.defaults
    assert [{**group, "params": list(map(id, group["params"]))} for group in built.param_groups] == [
        {**group, "params": list(map(id, group["params"]))} for group in by_hand.param_groups
    ]
    apart = {name for group in built.param_groups if group["rank"] is None for name in group["param_names"]}
    assert apart >= {"model.embed_tokens.weight", "model.norm.weight"}


def test_strings_are_read_as_what_they_say():
    model = llama()
    built = ApolloFactory()(
        model, lr="1e-2", betas="0.8, 0.9", rank="4", scale="auto", growth_limit="none", adamw_lr="0.001", fused="False"
    )
    group, *_ = (group for group in built.param_groups if group["rank"] is not None)
    assert (group["lr"], group["betas"], group["rank"], group["scale"]) == (0.01, (0.8, 0.9), 4, "auto")
    assert (group["growth_limit"], group["fused"]) == (None, False)
    assert {group["lr"] for group in built.param_groups if group["rank"] is None} == {0.001}


def test_training_arguments_that_are_handed_over_fill_in_what_options_do_not_say(tmp_path):
    args = arguments(tmp_path, learning_rate=0.5, weight_decay=0.25, max_grad_norm=0.75)
    built = ApolloFactory()(llama(), args)
    assert {group["lr"] for group in built.param_groups} == {0.5}
    assert {group["weight_decay"] for group in built.param_groups} == {0.25, 0.0}
    assert {group["lr"] for group in ApolloFactory()(llama(), args, lr=0.1).param_groups} == {0.1}
    with pytest.warns(UserWarning, match=r"max_grad_norm=0\.75: stepping in backward clips by"):
        ApolloFactory()(llama(), args, step_in_backward="true")


def test_experts_are_projected_as_matrices_of_their_own():
    model = llama()
    model.experts = nn.Parameter(torch.randn(3, 20, 10))
    built = ApolloFactory()(model, lr=0.01, rank=2)
    model.experts.grad = torch.randn_like(model.experts)
    built.step()
    assert tuple(built.state[model.experts]["exp_avg"].shape) == (3, 2, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a learning rate"),
        ({"lr": 0.01, "variant": "apolo"}, "variant 'apolo' is unknown; did you mean 'apollo'"),
        ({"lr": 0.01, "rank": "many"}, "rank must be an integer"),
        ({"lr": 0.01, "exclude": ("nothing",)}, "these patterns match no trainable parameter"),
        ({"lr": 0.01, "step_in_backward": "yes"}, "step_in_backward must be True or False, got 'yes'"),
        ({"lr": 0.01, "step_in_backward": True}, "needs max_grad_norm too"),
        ({"lr": 0.01, "max_grad_norm": 1.0}, "max_grad_norm=1.0 is for step_in_backward=True only"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(options, message):
    with pytest.raises(ValueError, match=message):
        ApolloFactory()(llama(), **options)


@pytest.mark.parametrize(
    ("option", "hint"),
    [("weight_decy", "did you mean 'weight_decay'"), ("adamwlr", "did you mean 'adamw_lr'"),
     ("step_in_backwards", "did you mean 'step_in_backward'"), ("update_proj_gap", "call it refresh_every"),
     ("learning_rate", "call it lr$")],
)  # fmt: skip
def test_an_unknown_option_is_a_type_error_with_the_one_that_was_meant(option, hint):
    with pytest.raises(TypeError, match=rf"^ApolloFactory\(\) got an unexpected keyword argument '{option}'; {hint}"):
        ApolloFactory()(llama(), lr=0.01, **{option: 0.1})


# A run.

RUNS = {
    "mini": ({"variant": "mini"}, {}),
    "apollo, accumulating": ({"rank": 4}, {"gradient_accumulation_steps": 2}),
    "galore": ({"variant": "galore", "rank": 4}, {}),
    "in backward": ({"variant": "mini", "step_in_backward": True, "max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    "in backward, accumulating": (
        {"rank": 4, "step_in_backward": True, "max_grad_norm": None},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
    ),
}


@pytest.mark.filterwarnings("ignore:max_grad_norm=0.5")
@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_is_resumed_equals_one_that_was_not_interrupted(tmp_path, run):
    options, given = RUNS[run]
    options = {"lr": 0.01, "weight_decay": 0.1, "refresh_every": 4, **options}
    whole = trainer(tmp_path / "whole", options, **given)
    whole.train()
    resumed = trainer(tmp_path / "resumed", options, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 6
    assert same(resumed.model, whole.model)


def test_accumulating_in_backward_equals_the_ordinary_mode(tmp_path):
    given = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    ordinary = trainer(tmp_path / "ordinary", {"lr": 0.01}, **given)
    inside = trainer(tmp_path / "inside", {"lr": 0.01, "step_in_backward": True, "max_grad_norm": None}, **given)
    ordinary.train()
    inside.train()
    assert same(ordinary.model, inside.model)


def test_the_model_is_clipped_and_scheduled_as_by_hand(tmp_path):
    built, batches = trainer(tmp_path, {"lr": 0.01, "rank": 4}, max_grad_norm=0.1), []
    built.model.register_forward_pre_hook(lambda _, args, given: batches.append(given), with_kwargs=True)
    built.train()
    model = llama()
    optimizer = APOLLO(model, lr=0.01, rank=4)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6)
    for batch in batches:
        model(**batch).loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert same(model, built.model)


class FailsOnce(torch.autograd.Function):
    """Runs out of memory in its first backward."""

    failed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailsOnce.failed:
            return grad
        FailsOnce.failed = True
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 bytes")


def test_a_batch_that_runs_out_of_memory_in_a_backward_that_steps_is_tried_smaller(tmp_path, monkeypatch):
    """What that backward had stepped stays as it is: here the head, and the norm before it."""
    monkeypatch.setattr(FailsOnce, "failed", False)
    options = {"lr": 0.01, "variant": "mini", "step_in_backward": True, "max_grad_norm": None}
    built = trainer(tmp_path, options, auto_find_batch_size=True, max_grad_norm=0.0, save_strategy="no")
    built.model.model.layers[0].register_forward_hook(lambda module, args, output: FailsOnce.apply(output))
    built.train()
    assert FailsOnce.failed
    assert (built.state.global_step, built.state.train_batch_size) == (6, 3)
    steps = {name: float(built.optimizer.state[weight]["step"]) for name, weight in built.model.named_parameters()}
    assert [name for name, count in steps.items() if count == 7] == ["model.norm.weight", "lm_head.weight"]
    assert set(steps.values()) == {6, 7}


# The log.


@pytest.mark.parametrize("clip", [0.5, None])
def test_statistics_are_in_every_training_log(tmp_path, clip):
    logged = []

    class Reporter(transformers.TrainerCallback):
        """As those of TensorBoard and wandb, it is called before a user's own."""

        def on_log(self, args, state, control, logs, **kwargs):
            logged.append(dict(logs))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"max_grad_norm": clip or 0.0, "max_steps": 2}
        inside = trainer(tmp_path / "in", {"lr": 0.01, "step_in_backward": True, "max_grad_norm": clip}, **given)
        inside.add_callback(Reporter())
        OptimizerStatistics.add_to(inside)
        inside.train()
    ordinary = trainer(tmp_path / "ordinary", {"lr": 0.01}, max_steps=2)
    ordinary.train()
    steps = [line for line in logged if "loss" in line]
    assert len(steps) == 2
    for line, kept in zip(steps, inside.state.log_history, strict=False):
        assert 0 < line["optimizer/gain/min"] <= line["optimizer/gain/max"]
        assert line["optimizer/skipped"] == 0
        state = inside.optimizer.state.values()
        assert line["optimizer/state_bytes"] == sum(entry.nbytes for each in state for entry in each.values())
        assert kept == {**line, "step": kept["step"]}
    if clip is None:
        assert all("grad_norm" not in line for line in steps)
    else:
        # The first batch's is unclipped; float32 sums in another order.
        assert steps[0]["grad_norm"] == pytest.approx(float(ordinary.state.log_history[0]["grad_norm"]), rel=1e-5)
    assert "optimizer/skipped" not in logged[-1]


def test_statistics_of_another_optimizer_are_refused(tmp_path):
    other = Trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=texts())
    OptimizerStatistics.add_to(other)
    with pytest.raises(ValueError, match="this trainer has AdamW"):
        other.train()


# Traps.


def test_bare_parameters_of_a_large_vocabulary_are_left_to_adamw(tmp_path):
    """As the Trainer hands them over to an optimizer's class in place of the factory."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=16, intermediate_size=44, num_hidden_layers=1, num_attention_heads=2
    )
    built = Trainer(
        LlamaForCausalLM(config), arguments(tmp_path), train_dataset=texts(), optimizer_cls_and_kwargs=(APOLLO, {})
    )
    with pytest.warns(UserWarning, match=r"\(32000, 16\) looks like an embedding or a head.*left to AdamW") as caught:
        optimizer = built.create_optimizer()
    assert caught[0].filename == __file__, "not a file of transformers"
    model = built.model
    model.model.embed_tokens.weight.grad = torch.ones(32000, 16)
    optimizer.step()
    assert optimizer.state[model.model.embed_tokens.weight]["exp_avg"].shape == (32000, 16)


def test_a_model_that_peft_wraps_after_the_optimizer_was_built_is_noticed(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    optimizer = APOLLO(model, lr=0.01)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    built = Trainer(adapted, arguments(tmp_path), train_dataset=texts(), optimizers=(optimizer, None))
    with pytest.raises(RuntimeError, match=r"none of the optimizer's 12 weights requires a gradient any more.*peft"):
        built.train()
    step_in_backward(model, optimizer)
    with pytest.raises(RuntimeError, match="requires a gradient any more"):
        optimizer.step()


def test_a_model_that_is_frozen_from_the_start_may_be_stepped():
    frozen = nn.Parameter(torch.ones(9, 40), requires_grad=False)
    optimizer = APOLLO([frozen])
    optimizer.step()
    assert torch.equal(frozen, torch.ones(9, 40))


def test_adapters_train_through_the_factory(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    before = weights(adapted)
    built = trainer(tmp_path, {"lr": 0.01}, model=adapted)
    built.train()
    changed = {name for name, weight in weights(built.model).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("tied", [False, True])
def test_int8_weights_are_saved_wide(tmp_path, tied):
    model = quantize_weights_(llama(tied).bfloat16(), group_size=8)
    built = trainer(tmp_path, {"lr": 0.01}, model=model, max_steps=2)
    built.train()
    folder = tmp_path / "checkpoint-2"
    tokens = texts(1)[0]["input_ids"][None]
    expected = model(tokens).logits
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(tokens).logits, expected)
    # A resumed run takes the wide weights, and rounds them again.
    resumed = trainer(tmp_path, {"lr": 0.01}, model=quantize_weights_(llama(tied).bfloat16(), group_size=8))
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 6
    dequantize_weights_(model)
    model.save_pretrained(tmp_path / "by hand")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "by hand")(tokens).logits, expected)


# TRL.


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def sentences(count: int, seed: int) -> list[str]:
    drawn = torch.randint(3, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{word}" for word in row) for row in drawn.tolist()]


def sft(folder, options):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    return trl.SFTTrainer(
        model=llama(),
        args=arguments(folder, trl.SFTConfig, max_length=LENGTH, gradient_checkpointing=False, bf16=False),
        train_dataset=datasets.Dataset.from_dict({"text": sentences(32, 0)}),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(ApolloFactory, options),
    )


def dpo(folder, options):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    columns = {name: sentences(32, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
    built = trl.DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=arguments(folder, trl.DPOConfig, gradient_checkpointing=False, bf16=False),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )
    built.optimizer_cls_and_kwargs = (ApolloFactory, options)
    return built


@pytest.mark.parametrize("kind", [sft, dpo])
def test_trainers_of_trl_train_and_resume(tmp_path, kind):
    options = {"lr": 0.01, "variant": "mini"}
    whole = kind(tmp_path / "whole", options)
    whole.train()
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    resumed = kind(tmp_path / "resumed", options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(resumed.model, whole.model)
