"""Which weights are projected: every parameter is claimed once, embeddings and head are left to AdamW."""

import io
import re
import warnings

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, APOLLOMini, ArtemisMini, optimizer_memory, param_groups
from family import FAMILY
from runs import run, snapshot

VOCABULARY, WIDTH, HIDDEN = 96, 16, 40


class Decoder(nn.Module):
    """A language model in miniature; `head` names its output layer."""

    def __init__(self, head: str = "lm_head", vocabulary: int = VOCABULARY, width: int = WIDTH, hidden: int = HIDDEN):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": nn.Linear(width, width, bias=False),
                    "up": nn.Linear(width, hidden),
                    "down": nn.Linear(hidden, width),
                }
            )
            for _ in range(2)
        )
        self.add_module(head, nn.Linear(width, vocabulary, bias=False))


MATRICES = {f"blocks.{i}.{kind}.weight" for i in range(2) for kind in ("attention", "up", "down")}


def projected(groups) -> set[str]:
    return {name for group in groups if group.get("rank", ...) is not None for name, _ in group["params"]}


def names(groups) -> list[str]:
    return sorted(name for group in groups for name, _ in group["params"])


def claims_every_parameter_once(model: nn.Module, groups) -> bool:
    claimed = [weight for group in groups for _, weight in group["params"]]
    return len(claimed) == len(set(claimed)) and set(claimed) == {w for w in model.parameters() if w.requires_grad}


# Embeddings and head.


@pytest.mark.parametrize("head", ["lm_head", "output", "unembed", "logits"])
def test_embeddings_and_head_are_left_to_adamw_whatever_the_head_is_called(head):
    model = Decoder(head)
    groups = param_groups(model)
    assert claims_every_parameter_once(model, groups)
    assert projected(groups) == MATRICES


def test_several_heads_of_any_width_are_left_to_adamw():
    heads = {"next": nn.Linear(WIDTH, VOCABULARY), "after": nn.Linear(HIDDEN, VOCABULARY)}
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, WIDTH), "layer": nn.Linear(WIDTH, HIDDEN), **heads})
    assert projected(param_groups(model)) == {"layer.weight"}


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocabulary": WIDTH},
        {"vocabulary": HIDDEN},
        {"vocabulary": 128},
        {"width": 128},
        {"hidden": 128},
        {"vocabulary": 128, "hidden": 128},
        {"vocabulary": 32, "width": 128},
    ],
    ids=str,
)
def test_layers_inside_are_projected_even_where_their_width_is_the_vocabularys(sizes):
    # Small models often have equal sizes: hidden layers must not be taken for heads, nor the head be missed because
    # there are more positions than words.
    assert projected(param_groups(Decoder("output", **sizes))) == MATRICES


@pytest.mark.parametrize("head", ["lm_head", "output"])
def test_a_head_tied_by_module_is_claimed_once_under_its_first_name(head):
    model = Decoder(head)
    getattr(model, head).weight = model.embed.weight
    groups = param_groups(model)
    assert claims_every_parameter_once(model, groups)
    assert projected(groups) == MATRICES
    assert "embed.weight" in names(groups)
    assert f"{head}.weight" not in names(groups)


def test_a_weight_tied_by_shared_storage_is_an_embedding_too():
    class Untyped(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.kernel = nn.Parameter(weight)

    model = Decoder()
    model.lm_head = Untyped(model.embed.weight.detach())
    assert projected(param_groups(model)) == MATRICES
    model.lm_head = Untyped(model.embed.weight.detach().mT)
    assert projected(param_groups(model)) == MATRICES


def test_weights_that_are_views_of_one_buffer_are_not_taken_for_tied():
    model = Decoder()
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    offset = 0
    for weight in model.parameters():
        weight.data = flat[offset : offset + weight.numel()].view(weight.shape)
        offset += weight.numel()
    assert projected(param_groups(model)) == MATRICES


def test_a_model_on_the_meta_device_is_grouped_alike():
    with torch.device("meta"):
        model = Decoder("output")
    assert projected(param_groups(model)) == MATRICES


def test_a_bag_of_embeddings_is_an_embedding():
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.EmbeddingBag(50, 12, device=device), nn.Linear(12, 20, device=device))
        assert projected(param_groups(model)) == {"1.weight"}


def test_an_embedding_of_an_unknown_kind_is_left_to_adamw_with_a_warning():
    model = nn.Sequential(nn.Linear(16, 32, device="meta"))
    model.table = nn.Parameter(torch.empty(50257, 32, device="meta"))
    with pytest.warns(
        UserWarning, match=r"^table \(50257, 32\) looks like an embedding .* left to AdamW. Add it to exclude"
    ) as caught:
        assert projected(param_groups(model)) == {"0.weight"}
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"^table ") as caught:
        APOLLO(model)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert projected(param_groups(model, exclude=("table",))) == {"0.weight"}
        assert projected(param_groups(model, exclude=())) == {"0.weight", "table"}


# Exclusions.


def test_exclude_takes_module_classes_modules_and_regular_expressions():
    model = Decoder()
    assert projected(param_groups(model, exclude=(nn.Linear,))) == {"embed.weight", "positions.weight"}
    second = {name for name in MATRICES if ".1." in name}
    assert projected(param_groups(model, exclude=(nn.Embedding, model.blocks[0]["up"]))) == MATRICES - {
        "blocks.0.up.weight"
    }
    assert projected(param_groups(model, exclude=(nn.Embedding, r"blocks\.0"))) == second
    assert projected(param_groups(model, exclude=[nn.Embedding, re.compile("BLOCKS.0", re.IGNORECASE)])) == second


def test_an_empty_exclude_projects_every_matrix():
    model = Decoder()
    assert projected(param_groups(model, exclude=())) == MATRICES | {
        "embed.weight",
        "positions.weight",
        "lm_head.weight",
    }


def test_a_pattern_that_matches_nothing_is_refused_and_listed():
    model = Decoder()
    with pytest.raises(ValueError, match=r"these patterns match no trainable parameter of the model: 'router'$"):
        param_groups(model, exclude=(nn.Embedding, "router"))
    with pytest.raises(ValueError, match="no trainable parameter") as caught:
        param_groups(model, exclude=("router", re.compile("gate"), nn.Conv2d, nn.Linear(2, 2)))
    for asked in ("'router'", "'gate'", "Conv2d", "Linear(in_features=2"):
        assert asked in str(caught.value)
    with pytest.raises(ValueError, match=r"no trainable parameter.*'rotary'"):
        param_groups(model, no_decay=("rotary",))
    model.embed.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter.*'embed'"):
        param_groups(model, exclude=("embed",))


def test_defaults_may_match_nothing():
    assert projected(param_groups(nn.Linear(12, 20))) == {"weight"}


@pytest.mark.parametrize("lone", ["lm_head", nn.Embedding, re.compile("lm_head"), nn.Linear(2, 2)], ids=repr)
def test_a_lone_pattern_is_refused_with_the_tuple_to_write(lone):
    with pytest.raises(ValueError, match=r"^patterns must come in a sequence, got .*; write \(.*,\)$"):
        param_groups(Decoder(), exclude=lone)


@pytest.mark.parametrize("pattern", [5, None, int, ("a",)], ids=repr)
def test_a_pattern_of_another_kind_is_refused(pattern):
    with pytest.raises(ValueError, match="a pattern must be a module class, a module or a regular expression, got"):
        param_groups(Decoder(), exclude=(pattern,))


# Learning rates, decay, convolutions.


def test_decay_is_for_matrices_that_no_norm_owns():
    model = Decoder()
    model.planar = nn.LayerNorm((6, 7))
    groups = param_groups(model, weight_decay=0.1)
    decayed = {name for group in groups if group["weight_decay"] == 0.1 for name, _ in group["params"]}
    assert decayed == MATRICES | {"embed.weight", "positions.weight", "lm_head.weight"}
    assert "planar.weight" not in projected(groups)
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    spared = param_groups(model, weight_decay=0.1, no_decay=(nn.Embedding, r"\.1\.up"))
    decayed = {name for group in spared if group["weight_decay"] == 0.1 for name, _ in group["params"]}
    assert decayed == MATRICES - {"blocks.1.up.weight"}
    assert projected(spared) == MATRICES


def test_learning_rates_of_the_projected_and_of_the_rest():
    def rates(**options):
        return {(group.get("rank", ...), group.get("lr")) for group in param_groups(Decoder(), **options)}

    assert rates() == {(..., None), (None, None)}
    assert rates(lr=0.1) == {(..., 0.1), (None, 0.1)}
    assert rates(adamw_lr=0.01) == {(..., None), (None, 0.01)}
    assert rates(lr=0.1, adamw_lr=0.01, rank=8) == {(8, 0.1), (None, 0.01)}


def test_no_rank_leaves_everything_to_adamw():
    model = Decoder()
    groups = param_groups(model, rank=None)
    assert projected(groups) == set()
    assert claims_every_parameter_once(model, groups)


def test_options_reach_every_group():
    # Elsewhere betas and eps given once reach only half of the weights.
    for group in param_groups(Decoder(), betas=(0.8, 0.9), eps=1e-6, scale="auto"):
        assert (group["betas"], group["eps"], group["scale"]) == ((0.8, 0.9), 1e-6, "auto")


def test_convolutions_are_flattened_and_three_dimensional_weights_are_not():
    model = nn.ModuleDict({"conv1": nn.Conv1d(4, 8, 3), "conv2": nn.Conv2d(4, 8, 3), "up": nn.ConvTranspose1d(4, 8, 3)})
    model.experts = nn.Parameter(torch.zeros(3, 8, 12))
    groups = param_groups(model)
    flattened = {name for group in groups if group["flatten"] for name, _ in group["params"]}
    assert flattened == {"conv1.weight", "conv2.weight", "up.weight"}
    assert projected(groups) == flattened | {"experts"}


def test_frozen_parameters_are_in_no_group():
    model = Decoder()
    model.blocks[0].requires_grad_(False)
    groups = param_groups(model)
    assert claims_every_parameter_once(model, groups)
    assert projected(groups) == {name for name in MATRICES if ".1." in name}


# The model itself.


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.group], ids=str)
def test_a_model_is_taken_as_its_groups(member):
    runs = []
    for as_groups in (False, True):
        torch.manual_seed(0)
        model = Decoder("output")
        built = member.build(model, lr=0.01, weight_decay=0.1)
        if as_groups:
            rank = None if built.defaults["rank"] is None else ...  # where nothing is projected, groups are fewer
            own = built.own_vocabulary != "adamw"
            words = {"vocabulary": "factored", "vocabulary_lr": 0.01 * built.vocabulary_lr_ratio} if own else {}
            built = member.build(param_groups(model, rank=rank, **words), lr=0.01, weight_decay=0.1)
        run(built, dict(model.named_parameters()), range(3))
        runs.append(snapshot(built))
    assert runs[0] == runs[1]


def test_groups_without_a_rank_have_that_of_the_optimizer_they_go_to():
    # One list of groups for several optimizers, none of which writes its options into it.
    model = Decoder()
    groups = param_groups(model)
    as_made = [dict(group) for group in groups]
    ranks = [
        {group["rank"] for group in built.param_groups} - {None}
        for built in (APOLLO(groups, rank=3), APOLLOMini(groups), ArtemisMini(groups), APOLLO(groups, rank=None))
    ]
    assert ranks == [{3}, {1}, {1 / 64}, set()]
    assert optimizer_memory(groups, APOLLOMini) == optimizer_memory(model, APOLLOMini)
    assert groups == as_made
    # Nor do other libraries' find anything in it that a checkpoint could not hold.
    file = io.BytesIO()
    torch.save(torch.optim.AdamW(groups).state_dict(), file)
    file.seek(0)
    assert len(torch.load(file, weights_only=True)["param_groups"]) == len(groups)


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.group], ids=str)
def test_every_optimizer_takes_groups_made_without_it_in_mind(member):
    # One without a projection has no use for a rank.
    model = Decoder()
    optimizer = member.build(param_groups(model, rank=0.25), lr=0.01)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    run(optimizer, dict(model.named_parameters()), range(2))
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())


# Architectures of Hugging Face, in miniature.

SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HF_MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": False}),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama with a vocabulary as small as its width": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"tie_word_embeddings": False, "vocab_size": 32},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_ff": 64, "d_kv": 8, "num_layers": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
}


def hf_model(kind: str):
    transformers = pytest.importorskip("transformers")
    model, config, options = HF_MODELS[kind]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if "Llama" in model or "Mixtral" in model:
        shape["num_key_value_heads"] = 2
    return getattr(transformers, model)(getattr(transformers, config)(**(SIZES | shape | options)))


@pytest.mark.parametrize("kind", HF_MODELS)
def test_hugging_face_models_have_embeddings_and_head_left_to_adamw(kind):
    model = hf_model(kind)
    groups = param_groups(model, weight_decay=0.1)
    assert claims_every_parameter_once(model, groups)
    vocabulary = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    vocabulary |= {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    rest = {weight for weight in model.parameters() if weight.dim() >= 2} - vocabulary
    weights = dict(model.named_parameters())
    assert {weights[name] for name in projected(groups)} == rest
    optimizer = APOLLO(model, lr=0.01)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert set(optimizer.state) == set(model.parameters())


def test_a_layer_as_wide_as_the_positions_is_not_a_head():
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(500, 64),
            "positions": nn.Embedding(256, 64),
            "key": nn.Linear(64, 256, bias=False),
            "out": nn.Linear(64, 500, bias=False),
        }
    )
    assert projected(param_groups(model)) == {"key.weight"}
