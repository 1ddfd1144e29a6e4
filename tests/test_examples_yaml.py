"""LLaMA-Factory and axolotl find a stand-in by the files of `examples/`, and train and resume where installed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO
from apollo_optim.integrations import apollo_torch
from runs import bits

yaml = pytest.importorskip("yaml")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 6


def loaded(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())


def tiny_model(folder: Path) -> Path:
    """A folder with an untrained LLaMA of a few thousand weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", "<s>", *(f"w{number}" for number in range(60))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **specials).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=3, max_position_embeddings=128, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def questions(path: Path) -> Path:
    """A file of instructions and answers, in the words of `tiny_model`."""
    drawn = torch.randint(60, (48, 2, 8), generator=torch.Generator().manual_seed(0)).tolist()
    spoken = [[" ".join(f"w{word}" for word in words) for words in pair] for pair in drawn]
    path.write_text(json.dumps([{"instruction": asked, "input": "", "output": answer} for asked, answer in spoken]))
    return path


def whole_and_resumed(
    command: list[str], folder: Path, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after a run of a program, and after one that goes on from its first checkpoint."""
    whole = trained(command, folder / "whole", options)
    resume = {"resume_from_checkpoint": str(folder / "whole" / "checkpoint-2")}
    return whole, trained(command, folder / "resumed", options | resume)


def trained(command: list[str], out: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that a program leaves in `out` by a file of options."""
    from safetensors.torch import load_file

    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(options | {"output_dir": str(out)}))
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, str(file)], capture_output=True, text=True, cwd=out.parent, env=offline
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return load_file(out / f"checkpoint-{STEPS}" / "model.safetensors")


def check_run(folder: Path, whole: dict[str, Tensor], resumed: dict[str, Tensor]) -> None:
    """The matrices were projected, have moved, and a resumed run equals the whole one to the last bit."""
    first = transformers.LlamaForCausalLM.from_pretrained(folder / "model").state_dict()
    assert not torch.equal(whole["model.layers.0.mlp.up_proj.weight"], first["model.layers.0.mlp.up_proj.weight"])
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    saved = torch.load(folder / "whole" / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
    assert {group["rank"] for group in saved["param_groups"]} == {None, 4}
    # Of seven matrices, of embedding and head, and of three norms.
    shapes = Counter(tuple(entry["exp_avg"].shape) for entry in saved["state"].values())
    assert shapes == {(4, 24): 4, (4, 44): 3, (64, 24): 2, (24,): 3}


def test_llama_factory_trains_and_resumes(tmp_path):
    pytest.importorskip("llamafactory", reason="LLaMA-Factory needs an environment of its own")
    questions(tmp_path / "questions.json")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"questions": {"file_name": "questions.json"}}))
    options = loaded("llamafactory.yaml") | {
        "model_name_or_path": str(tiny_model(tmp_path / "model")), "template": "default", "dataset": "questions",
        "dataset_dir": str(tmp_path), "cutoff_len": 64, "apollo_rank": 4, "apollo_update_interval": 3,
        "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": 2,
        "bf16": False, "use_cpu": True, "report_to": "none",
    }  # fmt: skip
    check_run(tmp_path, *whole_and_resumed(["llamafactory.cli", "train"], tmp_path, options))


def test_axolotl_trains_and_resumes(tmp_path):
    pytest.importorskip("axolotl", reason="axolotl needs an environment of its own")
    given = loaded("axolotl.yaml")
    options = given | {
        "base_model": str(tiny_model(tmp_path / "model")),
        "datasets": [{"path": str(questions(tmp_path / "questions.json")), "type": "alpaca"}],
        "dataset_prepared_path": str(tmp_path / "prepared"), "sequence_len": 64,
        "optim_args": given["optim_args"] | {"rank": 4, "update_proj_gap": 3},
        "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": 2, "bf16": False,
    }  # fmt: skip
    command = ["axolotl.cli.main", "train", "--launcher", "python"]
    check_run(tmp_path, *whole_and_resumed(command, tmp_path, options))


# Without them: the optimizer that each file's options make.


def steps_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[bytes]:
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(weight) for weight in model.parameters()]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 20))


def matrices(model: nn.Module, those: bool) -> list[Tensor]:
    return [weight for weight in model.parameters() if (weight.dim() == 2) == those]


def test_the_file_for_llama_factory_is_our_optimizer_spelt_out():
    given = loaded("llamafactory.yaml")
    assert given["use_apollo"]
    model, twin = net(), net()
    # As LLaMA-Factory makes groups of its options.
    theirs = {
        "rank": given["apollo_rank"],
        "proj": given["apollo_proj"],
        "proj_type": given["apollo_proj_type"],
        "update_proj_gap": given["apollo_update_interval"],
        "scale": given["apollo_scale"],
        "scale_type": given["apollo_scale_type"],
        "scale_front": given["apollo_scale_front"],
    }
    decay = {"weight_decay": given["weight_decay"]}
    groups = [
        {"params": matrices(model, False), "weight_decay": 0.0},
        {"params": [], **decay},
        {"params": matrices(model, True), **decay, **theirs},
    ]
    stand_in = apollo_torch.APOLLOAdamW(groups, lr=given["learning_rate"], betas=(0.9, 0.999), eps=1e-8)
    ours = [{"params": matrices(twin, False), "rank": None}, {"params": matrices(twin, True), "rank": 256}]
    assert steps_of(stand_in, model) == steps_of(APOLLO(ours, lr=1e-4), twin)


def test_the_file_for_axolotl_is_our_optimizer_spelt_out(tmp_path):
    pytest.importorskip("accelerate")
    given = loaded("axolotl.yaml")
    apollo_torch.install()
    # As axolotl hands its options to transformers.
    args = transformers.TrainingArguments(
        str(tmp_path),
        optim=given["optimizer"],
        optim_args=",".join(f"{key}={value}" for key, value in given["optim_args"].items()),
        optim_target_modules=given["optim_target_modules"],
        learning_rate=given["learning_rate"],
        use_cpu=True,
    )
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    optimizer = transformers.Trainer(model, args, train_dataset=[{}]).create_optimizer()
    assert isinstance(optimizer, APOLLO)
    others, projected = optimizer.param_groups
    assert others["rank"] is None
    assert len(projected["params"]) == 7
    expected = {"rank": 256, "projection": "gaussian", "granularity": "channel", "scale": 1.0, "refresh_every": 200}
    assert expected.items() <= projected.items()
    assert projected["lr"] == 1e-4
