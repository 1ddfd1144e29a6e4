"""The model shapes that memory figures are made from."""

import math

import pytest

from apollo_optim.llama import MODELS, PRESETS, SMALL, VOCABULARY
from apollo_optim.planner.models import llama_parameters

PARAMETERS = {
    "60m": 58_073_600,
    "130m": 134_105_856,
    "350m": 367_969_280,
    "1b": 1_339_082_752,
    "7b": 6_738_415_616,  # what Meta's LLaMA-7B has
    "13b": 13_015_864_320,
}


def test_every_model_has_its_number_of_parameters():
    counted = {name: sum(math.prod(shape) for _, shape in llama_parameters(model)) for name, model in MODELS.items()}
    assert counted == PARAMETERS


@pytest.mark.parametrize(("name", "millions"), [("1m", 1), ("9m", 9)])
def test_small_models_are_about_as_large_as_their_names(name, millions):
    parameters = sum(math.prod(shape) for _, shape in llama_parameters(SMALL[name]))
    assert parameters == pytest.approx(millions * 1e6, rel=0.06)


@pytest.mark.parametrize("name", ["1m", "60m", "1b"])
def test_names_shapes_and_order_are_those_of_hugging_face(name):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    ours = PRESETS[name]
    config = transformers.LlamaConfig(
        hidden_size=ours.hidden,
        intermediate_size=ours.intermediate,
        num_attention_heads=ours.heads,
        num_hidden_layers=ours.layers,
        vocab_size=ours.vocabulary,
    )
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    assert llama_parameters(ours) == [(name, tuple(weight.shape)) for name, weight in theirs.named_parameters()]


@pytest.mark.parametrize("name", PRESETS)
def test_heads_share_the_width_evenly(name):
    assert PRESETS[name].hidden % PRESETS[name].heads == 0


def test_the_vocabulary_is_what_has_its_length():
    long = {name for name, shape in llama_parameters(MODELS["60m"]) if 32000 in shape}
    assert long == set(VOCABULARY)
