"""The model that is trained and its loss: built as asked for, computed as defined, counted as documented."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from apollo_optim.cli import main  # noqa: E402
from apollo_optim.evidence.benches import _parameters  # noqa: E402
from apollo_optim.llama import PRESETS, SMALL  # noqa: E402
from apollo_optim.planner.models import llama_parameters  # noqa: E402
from apollo_optim.train import attention  # noqa: E402
from apollo_optim.train.attention import attended, has_causal_attention, packed_mask, reads_starts  # noqa: E402
from apollo_optim.train.data.tokenizer import loaded_tokenizer  # noqa: E402
from apollo_optim.train.losses import Objective  # noqa: E402
from apollo_optim.train.metrics import PEAK_TFLOPS, flops_per_token, peak_flops  # noqa: E402
from apollo_optim.train.model import Model, _materialise_rotations_, built_model, objective  # noqa: E402
from apollo_optim.train.model_files import ENCODERS  # noqa: E402
from family import partly_slow  # noqa: E402
from small_training import OWN_KINDS, Watch, text  # noqa: E402

TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 48, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    """The path of a configuration small enough to build at once."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


# The model with its loss


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_the_objective_is_hugging_faces_own_loss(tiny, kind):
    model = built_model(Model(model=tiny), 48, "cpu", 0)
    tokens = text()
    loss = Objective(model, kind, chunk=7)(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    theirs = model(input_ids=tokens, labels=tokens).loss
    theirs.backward()
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=0)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", partly_slow(OWN_KINDS, quick=["chunked"]))
def test_a_traced_objective_has_the_same_loss_and_gradients(tmp_path, kind):
    (tmp_path / "one.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    model = built_model(Model(model=str(tmp_path / "one.json")), 48, "cpu", 0)
    tokens = text(2, 13)
    plain = Objective(model, kind, chunk=8)
    expected = plain(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    # Traced as for a GPU, but not turned into code, which takes a minute. A plain loss is one graph with the model.
    _materialise_rotations_(model)
    traced = torch.compile(plain, backend="aot_eager", fullgraph=kind == "plain")
    loss = traced(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, grads[name], rtol=1e-5, atol=1e-7)
    torch._dynamo.reset()


def test_the_objective_takes_its_settings_from_the_configuration(tiny):
    model = built_model(Model(model=tiny), 48, "cpu", 0)
    assert objective(Model(), model, "cpu").kind == "plain"
    assert objective(Model(compile=False), model, "cuda").kind == "chunked"
    assert objective(Model(compile=False, loss="plain"), model, "cuda").kind == "plain"
    chosen = objective(Model(loss="chunked", loss_chunk=5), model, "cpu")
    assert (chosen.kind, chosen.chunk) == ("chunked", 5)
    assert objective(Model(), model, "cpu")._compiled_call_impl is None
    assert objective(Model(compile=True), model, "cpu")._compiled_call_impl is not None


@pytest.mark.parametrize("kind", ["chunked", "liger", "cce"])
def test_a_head_that_does_more_than_multiply_is_refused_by_all_but_the_plain_loss(monkeypatch, kind):
    monkeypatch.setattr("apollo_optim.train.losses.check_installed", lambda kind: None)
    config = transformers.Gemma2Config(
        vocab_size=48, hidden_size=16, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    Objective(model, "plain")
    assert objective(Model(compile=False), model, "cuda").kind == "plain"
    with pytest.raises(ValueError, match=rf'"{kind}" needs .* has final_logit_softcapping; use loss "plain"'):
        Objective(model, kind)


class Scaled(transformers.LlamaForCausalLM):
    """As architectures do of which no configuration is known to us."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits = 0.5 * output.logits
        return output


class Uncalled(transformers.LlamaForCausalLM):
    """Whose head is a weight like any other."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=hidden @ self.lm_head.weight.T)


class Shifted(transformers.LlamaForCausalLM):
    def __init__(self, config: transformers.LlamaConfig):
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


@pytest.mark.parametrize(
    ("architecture", "where"),
    [
        (Scaled, "something between the head and its logits"),
        (Shifted, "something between its last hidden states and the head"),
        (Uncalled, "a head that it does not call"),
        (transformers.RecurrentGemmaForCausalLM, "something between the head and its logits"),
    ],
    ids=["scaled", "shifted", "not called", "capped"],
)
def test_what_is_done_to_logits_is_found_without_a_word_of_it(architecture, where):
    config = architecture.config_class(
        vocab_size=48, hidden_size=16, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, lru_width=16,
    )  # fmt: skip
    model = architecture(config).train()
    draws = torch.get_rng_state()
    assert objective(Model(compile=False), model, "cuda").kind == "plain"
    with pytest.raises(ValueError, match=rf'"chunked" needs .* has {where}; use loss "plain"'):
        Objective(model, "chunked")
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize("architecture", [transformers.LlamaForCausalLM, transformers.MixtralForCausalLM])
def test_looking_at_a_head_runs_no_layer(architecture):
    """Which may be split among ranks already, and must not be run before the whole is."""
    config = architecture.config_class(
        vocab_size=48, hidden_size=16, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = architecture(config)
    layers = []
    hooks = [layer.register_forward_hook(lambda *_: layers.append(0)) for layer in model.model.layers]
    whole = Objective(model, "chunked")
    assert layers == []
    tokens = text(2, 9, 48)
    whole(tokens[:, :-1], tokens[:, 1:]).backward()
    assert layers == [0] * len(hooks)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    Objective(model, "chunked")


# Attention

GROUPED = TINY | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Two heads read the same keys."""


def packed_positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def kernels_of(loss_of: Objective, *batch: torch.Tensor) -> tuple[torch.Tensor, Any, list[dict[str, Any]]]:
    """Loss, gradients, and the options of every attention in the compiled graphs."""
    called: list[dict[str, Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    loss = torch.compile(loss_of, backend=backend)(*batch)
    return loss, torch.autograd.grad(loss, list(loss_of.parameters())), called


def test_a_compiled_causal_batch_has_no_mask_and_the_same_gradients(tmp_path):
    (tmp_path / "grouped.json").write_text(json.dumps(GROUPED | {"num_hidden_layers": 1}))
    model = built_model(Model(model=str(tmp_path / "grouped.json")), 48, "cpu", 0)
    tokens = text(3, 14)
    batch = tokens[:, :-1], tokens[:, 1:]
    loss, grads, called = kernels_of(Objective(model), *batch)
    model.set_attn_implementation("sdpa")
    expected, expected_grads, masked = kernels_of(Objective(model), *batch)
    assert [options["attn_mask"] is None and options["is_causal"] for options in called] == [True]
    assert all(options["attn_mask"] is not None for options in masked)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-7)


def test_examples_packed_into_a_compiled_batch_are_apart_as_without_a_compiler(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    model = built_model(Model(model=str(tmp_path / "one.json")), 48, "cpu", 0)
    tokens = text(2, 13)
    positions = torch.stack([packed_positions(5, 7), packed_positions(3, 1, 8)])
    batch = tokens[:, :-1], tokens[:, 1:], None, positions
    loss, grads, _ = kernels_of(Objective(model), *batch)
    model.set_attn_implementation("sdpa")
    expected = Objective(model)(*batch)  # uncompiled, where transformers looks at the positions
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, list(model.parameters())), rtol=1e-5, atol=1e-7)


def test_padding_and_a_cache_are_masked_as_ever(tiny):
    model = built_model(Model(model=tiny), 48, "cpu", 0).eval()
    prompts = text(2, 9)
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0
    written = {}
    for implementation in (attention.CAUSAL, "sdpa"):
        model.set_attn_implementation(implementation)
        written[implementation] = model.generate(
            prompts, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    assert torch.equal(*written.values())


@pytest.mark.parametrize("change", [{"sliding_window": 4}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_a_model_with_windows_keeps_its_masks(tmp_path, change):
    (tmp_path / "window.json").write_text(
        json.dumps(TINY | {"model_type": "qwen2", "use_sliding_window": True} | change)
    )
    model = built_model(Model(model=str(tmp_path / "window.json")), 48, "cpu", 0)
    assert not has_causal_attention(model)


def one_by_one(query, key, value, starts, ends, longest, longest_key, *, scale, window_size):
    """Attention over examples after one another [T, H, D], each by itself."""
    assert window_size == (-1, 0)
    assert starts is ends
    assert int(starts.diff().max()) <= longest == longest_key
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(each[first:last].transpose(0, 1)[None] for each in (query, key, value)), is_causal=True, scale=scale
        )[0].transpose(0, 1)
        for first, last in zip(starts.tolist(), starts[1:].tolist(), strict=False)
        if first < last
    ]
    return torch.cat(parts)


def test_boundaries_keep_packed_examples_apart_as_a_mask_does(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=one_by_one))
    positions = torch.stack([packed_positions(5, 7), packed_positions(3, 1, 8)])
    starts = torch.tensor([0, 5, 12, 15, 16, 24, 24], dtype=torch.int32)
    query, (key, value) = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 2, 12, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    options = {"scaling": 0.3, "cu_seq_lens_q": starts, "max_length_q": 12}
    ours, _ = attended(module, query, key, value, None, **options)
    masked, _ = attended(module, query, key, value, packed_mask(positions), scaling=0.3)
    torch.testing.assert_close(ours, masked)


@pytest.mark.cuda
def test_packed_examples_are_apart_on_a_gpu_without_a_mask(tmp_path):
    (tmp_path / "grouped.json").write_text(json.dumps(GROUPED))
    model = built_model(Model(model=str(tmp_path / "grouped.json")), 48, "cuda", 0)
    tokens = text(2, 13).cuda()
    positions = torch.stack([packed_positions(5, 7), packed_positions(3, 1, 8)]).cuda()
    batch = tokens[:, :-1], tokens[:, 1:], None, positions
    starts = torch.tensor([0, 5, 12, 15, 16, 24, 24], dtype=torch.int32, device="cuda")
    if not reads_starts(model, torch.device("cuda")):
        pytest.skip("needs torch 2.11")
    loss = Objective(model)(*batch, starts)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    model.set_attn_implementation("sdpa")
    expected = Objective(model)(*batch)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    # Two kernels in bf16, whose outputs differ by its rounding, 2^-8.
    torch.testing.assert_close(loss, expected, rtol=2**-8, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).norm() <= 2**-5 * theirs.norm()


# Building


@pytest.mark.parametrize("name", SMALL)
def test_a_preset_has_its_shapes_and_the_tokenizers_vocabulary(name):
    model = built_model(Model(model=name, positions=512), 300, "cpu", 0)
    shape = PRESETS[name]
    found = [(weight, tuple(tensor.shape)) for weight, tensor in model.named_parameters()]
    expected = [(w, (300, *s[1:]) if s[0] == shape.vocabulary else s) for w, s in llama_parameters(shape)]
    assert found == expected
    assert type(model) is transformers.LlamaForCausalLM
    assert model.training
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert has_causal_attention(model)
    assert model.config.max_position_embeddings == 512
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_weights_are_never_held_in_another_dtype(tiny):
    seen = set()
    with Watch(lambda tensor: seen.add(tensor.dtype) if tensor.numel() >= 16 * 16 else None):
        model = built_model(Model(model=tiny, dtype="bf16"), 48, "cpu", 0)
    assert seen == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    # Angles at far positions need more than the 8 bits of bf16.
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_layer_is_split_before_the_next_has_weights(tiny):
    """16 x 16 and larger: the embedding and seven of a layer, seven of the other, and then the head."""
    made, counts = set(), []
    whole = built_model(Model(model=tiny), 48, "cpu", 0)
    with Watch(lambda tensor: None if tensor.is_meta or tensor.numel() < 256 else made.add(tensor.data_ptr())):
        model = built_model(Model(model=tiny), 48, "cpu", 0, lambda layer: counts.append((layer, len(made))))
    assert counts == list(zip(model.model.layers, (8, 15), strict=True))
    assert len(made) == 16
    for name, weight in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), weight)


def test_the_layers_of_a_loaded_model_are_split_in_their_turn(tiny, tmp_path):
    built_model(Model(model=tiny), 48, "cpu", 0).save_pretrained(tmp_path / "model")
    split = []
    model = built_model(Model(model=str(tmp_path / "model")), 48, "cpu", 0, split.append)
    assert split == list(model.model.layers)


@pytest.mark.parametrize("change", [{"tie_word_embeddings": True}, {"model_type": "qwen2"}], ids=["tied", "qwen2"])
def test_the_layers_of_a_model_that_is_made_whole_are_split_too(tmp_path, change):
    path, split = tmp_path / "other.json", []
    path.write_text(json.dumps(TINY | change))
    whole = built_model(Model(model=str(path)), 48, "cpu", 0)
    model = built_model(Model(model=str(path)), 48, "cpu", 0, split.append)
    assert split == list(model.model.layers)
    for name, weight in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), weight)


def test_the_seed_decides_the_weights_and_nothing_else_is_drawn(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (built_model(Model(model=tiny), 48, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        if weight.dim() == 2:
            assert not torch.equal(weight, other.get_parameter(name))
            assert weight.std().item() == pytest.approx(0.02, rel=0.15)  # 256 draws or more: 4.4% is one sigma


def test_a_folder_with_weights_is_trained_further(tiny, tmp_path):
    model = built_model(Model(model=tiny), 48, "cpu", 3)
    model.save_pretrained(tmp_path / "model")
    loaded = built_model(Model(model=str(tmp_path / "model"), dtype="bf16"), 40, "cpu", 0)
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.bfloat16())
    assert loaded.training


def test_a_folder_without_weights_is_a_configuration(tiny, tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.json").write_text(json.dumps(TINY))
    by_file, by_folder = (built_model(Model(model=str(p)), 48, "cpu", 0) for p in (tiny, tmp_path / "only"))
    for name, weight in by_file.named_parameters():
        assert torch.equal(weight, by_folder.get_parameter(name))


OWN_CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of a model and a tokenizer that need Python code of their own, which leaves a mark when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")  # as `yes |` answers
    folder, marker = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    (folder / "code.py").write_text(OWN_CODE.format(marker=str(marker)))
    places = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "own", "auto_map": places}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}})
    )
    return folder, marker


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(own):
    folder, marker = own
    with pytest.raises(
        ValueError, match=r"comes with Python code of its own, which runs only with --trust-remote-code"
    ):
        built_model(Model(model=str(folder)), 48, "cpu", 0)
    assert not marker.exists()
    model = built_model(Model(model=str(folder), trust_remote_code=True), 48, "cpu", 0)
    assert type(model).__name__ == "OwnModel"
    assert marker.exists()


def test_a_model_with_code_of_its_own_is_counted_only_if_it_is_trusted(own, capsys):
    folder, marker = own
    counted = ["memory", str(folder), "--optimizer", "adamw", "--json"]
    assert main(counted) == 2
    assert "which runs only with --trust-remote-code" in capsys.readouterr().err
    assert not marker.exists()
    assert main([*counted, "--trust-remote-code"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["weights"] == 2 * _parameters(Model(model=str(folder), trust_remote_code=True))


def test_fine_tuning_says_how_to_trust_code_that_comes_with_a_model(own, tmp_path, capsys):
    folder, marker = own
    (folder / "model.safetensors").touch()
    (tmp_path / "data.jsonl").write_text("{}")
    flags = {"model": folder, "data": tmp_path / "data.jsonl", "out": tmp_path / "run"}
    assert main(["finetune", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]) == 2
    assert f"--model {folder} comes with Python code of its own, which runs only with" in capsys.readouterr().err
    assert not marker.exists()


def test_code_that_comes_with_a_tokenizer_runs_only_if_it_is_trusted(own):
    folder, marker = own
    with pytest.raises(
        ValueError, match=r"comes with Python code of its own, which runs only with --trust-remote-code"
    ):
        loaded_tokenizer(str(folder))
    assert not marker.exists()
    with pytest.raises(ValueError, match=r"cannot be loaded|has no token that ends a document"):
        loaded_tokenizer(str(folder), trust_remote_code=True)  # the code runs; it has no vocabulary
    assert marker.exists()


@pytest.mark.parametrize(
    ("kind", "count"),
    [("LlamaForSequenceClassification", 1), ("LlamaModel", 1), ("LlamaForCausalLM", 21)],
)
def test_weights_that_a_folder_lacks_are_not_drawn(tmp_path, kind, count):
    """Those of a model without a head, and those that a compiled one has saved under names of its own."""
    model = getattr(transformers, kind)(transformers.LlamaConfig(**TINY, num_labels=1))
    compiled = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=compiled if kind == "LlamaForCausalLM" else None)
    lacking = rf"cannot be made or loaded \(ValueError: the files lack {count} of the model's weights, lm_head\.weight"
    with pytest.raises(ValueError, match=lacking):
        built_model(Model(model=str(tmp_path)), 48, "cpu", 0)


@pytest.mark.parametrize("damage", ["cut", "header", "length", "empty"])
def test_damaged_weights_are_named(tiny, tmp_path, damage):
    built_model(Model(model=tiny), 48, "cpu", 0).save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    whole = weights.read_bytes()
    damaged = {
        "cut": whole[:-9],
        "header": whole[:8] + b"[" + whole[9:],
        "length": b"\xff" * 8 + whole[8:],
        "empty": b"",
    }
    weights.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf"--model {re.escape(str(tmp_path))} cannot be made or loaded"):
        built_model(Model(model=str(tmp_path)), 48, "cpu", 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -32}, "hidden_size must be an integer from 1 to 16,777,216, got -32"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10,000, got 1000000000"),
        ({"intermediate_size": "many"}, "intermediate_size must be an integer"),
        ({"vocab_size": 0}, "vocab_size must be an integer"),
        ({"text_config": {"num_attention_heads": 1.5}}, "num_attention_heads must be an integer"),
        ({"hidden_size": 2**22, "intermediate_size": 2**22}, "cannot be made or loaded (ValueError: it has"),
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads (7)"),
        ({"hidden_act": "nonsense"}, "cannot be made or loaded"),
        ({"model_type": "nonsense"}, '"model_type": "nonsense", and transformers'),
    ],
)
def test_a_configuration_that_no_model_has_is_named(tmp_path, change, said):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({**TINY, **change}))
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        built_model(Model(model=str(path)), 48, "cpu", 0)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("saved", [False, True])
def test_a_tokenizer_beyond_the_models_vocabulary_is_refused(tiny, tmp_path, saved):
    path = tiny
    if saved:
        path = str(tmp_path / "model")
        built_model(Model(model=tiny), 48, "cpu", 0).save_pretrained(path)
    with pytest.raises(ValueError, match=r"has a vocabulary of 48, and the tokenizer one of 49"):
        built_model(Model(model=path), 49, "cpu", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "60M"}, r"--model '60M' is unknown; did you mean '60m'\?"),
        ({"model": "nowhere/at-all"}, r"or a configuration or model folder, and there is none at that path"),
        ({"loss_chunk": 0}, r"--loss-chunk must be an integer >= 1, got 0"),
        ({"positions": 0}, r"--positions must be an integer from 1 to 2,147,483,648, got 0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        Model(**options).check()


def test_a_path_that_is_no_model_is_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        Model(model=str(tmp_path)).check()
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a folder or a configuration that ends in \.json"):
        Model(model=str(tmp_path / "weights.bin")).check()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "is not JSON"),
        ("{}", 'no "model_type"'),
        ('{"model_type": []}', 'no "model_type"'),
        ("[1]", "no configuration"),
        ("[" * 10**6, "is not JSON"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(tmp_path, written, said):
    (tmp_path / "config.json").write_text(written)
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=rf"--model: {tmp_path}/config\.json.*{said}"):
            Model(model=str(path)).check()


ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48,
    "embedding_size": 16, "max_position_embeddings": 40, "pad_token_id": 0, "languages": ["en"],
    "default_language": "en", "enable_pronunciation": False, "enable_shape": False,
}  # fmt: skip
"""Sizes as the encoders of transformers name them; each leaves out those of the others."""


def influences(model):
    """Of each token, the gradient that the logits of the fourth have in its embedding [T]."""
    found = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: found.append(output))
    logits = model.eval()(input_ids=text()[:1, :8]).logits
    handle.remove()
    (grad,) = torch.autograd.grad(logits[0, 3].square().sum(), found)
    return grad[0].abs().sum(-1)


@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_an_encoder_is_refused_and_its_decoder_sees_nothing_ahead(tmp_path, kind):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(ENCODER | {"model_type": kind}))
    with pytest.raises(ValueError, match=rf'--model {path} has "model_type": "{kind}", an encoder.*"is_decoder": true'):
        Model(model=str(path)).check()
    encoder = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    assert influences(encoder)[4:].all()
    path.write_text(json.dumps(ENCODER | {"model_type": kind, "is_decoder": True}))
    ahead = influences(built_model(Model(model=str(path)), 48, "cpu", 0))
    assert ahead[:4].all()
    assert not ahead[4:].any()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("t5", "and transformers .* has no causal language model"),
        ("distilbert", "and transformers .* has no causal language model"),
        ("bart", "an encoder and a decoder, of which a causal language model would be the decoder alone"),
        ("gptj", "whose attention transformers .* does not compute by scaled_dot_product_attention"),
    ],
)
def test_an_architecture_that_cannot_be_trained_here_is_refused(tmp_path, kind, why):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=rf'"model_type": "{kind}", {why}'):
        Model(model=str(tmp_path)).check()


def saved_for_backward(config):
    """(numbers kept for the backward pass, gradients) of one step."""
    model = built_model(config, 48, "cpu", 0)
    kept = []
    tokens = text()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        loss = Objective(model)(tokens, tokens)
    loss.backward()
    return sum(kept), {name: weight.grad for name, weight in model.named_parameters()}


def test_activation_checkpointing_keeps_less_and_changes_no_bit(tiny):
    whole, expected = saved_for_backward(Model(model=tiny))
    less, grads = saved_for_backward(Model(model=tiny, activation_checkpointing=True))
    assert less < whole / 2
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name])


# Counting


def test_flops_are_six_per_weight_and_twelve_per_attended_number():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_hidden_layers=8, vocab_size=32000,
                tie_word_embeddings=False,
            )
        )  # fmt: skip
    matrices = 8 * (4 * 512 * 512 + 3 * 512 * 1376) + 512 * 32000  # the embedding is looked up, norms are no products
    attention = 12 * 8 * 512 * 1024
    assert flops_per_token(model, 1024) == 6 * matrices + attention
    model.lm_head.weight.requires_grad_(False)
    assert flops_per_token(model, 1024) == 6 * matrices - 2 * 512 * 32000 + attention


def test_a_tied_head_is_counted_once(tiny):
    model = built_model(Model(model=tiny), 48, "cpu", 0)
    untied = flops_per_token(model, 8)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert flops_per_token(model, 8) == untied


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("Some Other Device", None),
    ],
)
def test_the_peak_of_a_known_gpu_is_found_by_its_name(monkeypatch, name, tera):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda") == (None if tera is None else tera * 1e12)
    assert peak_flops("cpu") is None


def test_no_name_of_a_gpu_hides_a_later_one():
    names = list(PEAK_TFLOPS)
    assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a in b]
