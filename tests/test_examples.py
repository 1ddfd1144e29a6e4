"""The examples for other libraries train, and go on after an interruption as if there had been none."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from apollo_optim import APOLLO
from apollo_optim.optimizer import ProjectedOptimizer
from ranks import Ranks
from runs import bits

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 6


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight_bits(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(weight) for name, weight in model.named_parameters()}


def whole_and_resumed(module: ModuleType, folder: Path, *options: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The weights of an uninterrupted run, and of one that ended after two steps and was resumed."""
    steps = ["--steps", str(STEPS), *options]
    with steps_taken() as taken:
        whole = module.main(["--out", str(folder / "whole"), *steps])
        stopped = module.main(["--out", str(folder / "resumed"), *steps, "--stop-after", "2"])
        resumed = module.main(["--out", str(folder / "resumed"), *steps, "--resume"])
        module.main(["--out", str(folder / "whole"), *steps, "--resume"])
    # It went on, and did not begin anew, nor after its end; and every weight is trained.
    assert len(taken) == STEPS + 2 + (STEPS - 2)
    after, before = weight_bits(whole), weight_bits(stopped)
    assert [name for name in after if after[name] == before[name]] == []
    return after, weight_bits(resumed)


@contextmanager
def steps_taken() -> Iterator[list[ProjectedOptimizer]]:
    """An optimizer of ours for every step that one takes meanwhile."""
    taken: list[ProjectedOptimizer] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, ProjectedOptimizer):
            taken.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield taken
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [(), ("--in-backward",)], ids=["ordinary", "in backward"])
def test_lightning_trains_and_resumes(tmp_path, options):
    pytest.importorskip("lightning")
    module = example("lightning_train")
    whole, resumed = whole_and_resumed(module, tmp_path, *options)
    assert whole == resumed


def test_lightning_in_backward_accumulates_as_in_the_ordinary_mode(tmp_path):
    pytest.importorskip("lightning")
    module = example("lightning_train")
    # Clipping differs: it is by the batch before. Nothing is clipped in a first step.
    given = ["--steps", "1", "--accumulate", "3"]
    inside = module.main(["--out", str(tmp_path / "inside"), "--in-backward", *given])
    module.lightning.Trainer = lightning_without_clipping(module.lightning.Trainer)
    ordinary = module.main(["--out", str(tmp_path / "ordinary"), *given])
    assert weight_bits(inside) == weight_bits(ordinary)


def lightning_without_clipping(trainer: Any) -> Any:
    return lambda **options: trainer(**(options | {"gradient_clip_val": None}))


def test_torchtitans_container_trains_and_resumes(tmp_path):
    pytest.importorskip("torchtitan.components.optimizer")
    whole, resumed = whole_and_resumed(example("torchtitan_train"), tmp_path)
    assert whole == resumed


def flat(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and options by parameter name, in one level, as torchtitan's container saves them."""
    saved = optimizer.state_dict()
    names = {
        i: name
        for group in saved["param_groups"]
        for i, name in zip(group["params"], group["param_names"], strict=True)
    }
    state = {f"state.{names[i]}.{key}": value for i, each in saved["state"].items() for key, value in each.items()}
    options = {
        f"param_groups.{name}.{key}": value
        for group in saved["param_groups"]
        for name in group["param_names"]
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return state | options


def nested(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """What `flat` has flattened, for this optimizer, whose names are not saved."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for group in optimizer.param_groups:
        first = len(result["state"])
        for i, (name, weight) in enumerate(zip(group["param_names"], group["params"], strict=True), start=first):
            result["state"][i] = {key: saved[f"state.{name}.{key}"] for key in optimizer.state[weight]}
        keys = group.keys() - {"params", "param_names"}
        options = {key: saved[f"param_groups.{group['param_names'][0]}.{key}"] for key in keys}
        result["param_groups"].append({**options, "params": list(range(first, len(result["state"])))})
    return result


def test_flattened_state_passes_through_a_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(8, 20)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[nn.Module, APOLLO]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 20))
        return model, APOLLO(model, lr=0.01, rank=4, refresh_every=3)

    model, optimizer = fresh()
    trained(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": flat(optimizer)}, checkpoint_id=tmp_path / "saved")
    trained(model, optimizer, range(2, STEPS))
    resumed, own = fresh()
    trained(resumed, own, range(1))  # makes state to load into
    saved = {"model": resumed.state_dict(), "optimizer": flat(own)}
    dcp.load(saved, checkpoint_id=tmp_path / "saved")
    resumed.load_state_dict(saved["model"])
    own.load_state_dict(nested(own, saved["optimizer"]))
    trained(resumed, own, range(2, STEPS))
    assert weight_bits(resumed) == weight_bits(model)


# Accelerate, on two ranks: sums of two numbers are the same in any order, and so in any of DDP's buckets.


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    two = Ranks(2)
    yield two
    two.close()


def fresh_accelerate() -> None:
    """Forget what another test has told accelerate in this process."""
    from accelerate.state import AcceleratorState, GradientState

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerated(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    fresh_accelerate()
    module = example("accelerate_train")
    whole, resumed = whole_and_resumed(module, folder, "--cpu")
    # Wrapped, and so with averaged gradients.
    assert all(name.startswith("module.") for name in whole)
    return whole, resumed


def test_accelerate_trains_and_resumes_under_ddp(two_ranks, tmp_path):
    pytest.importorskip("accelerate")
    answers = two_ranks.run(accelerated, tmp_path)
    for whole, resumed in answers:
        assert whole == resumed == answers[0][0]


def sharded(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Weights of both runs under FSDP2, by the parts of accelerate: it turns FSDP on where there are GPUs only."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
    from transformers import LlamaConfig, LlamaForCausalLM

    fresh_accelerate()
    accelerator = Accelerator(cpu=True)
    plugin = accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )

    def prepared() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        model, optimizer = accelerator._prepare_fsdp2(model, APOLLO(model, lr=0.01, rank=4, refresh_every=3))
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        return model, optimizer

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def gathered(model: nn.Module) -> dict[str, bytes]:
        return {name: bits(weight.full_tensor()) for name, weight in model.named_parameters()}

    model, optimizer = prepared()
    train(model, optimizer, range(2))
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    before = gathered(model)
    train(model, optimizer, range(2, STEPS))
    assert all(before[name] != weight for name, weight in gathered(model).items())
    resumed, own = prepared()
    load_fsdp_model(plugin, accelerator, resumed, str(folder))
    load_fsdp_optimizer(plugin, accelerator, own, resumed, str(folder))
    train(resumed, own, range(2, STEPS))
    return gathered(model), gathered(resumed)


def test_accelerate_trains_and_resumes_under_fsdp2(two_ranks, tmp_path):
    pytest.importorskip("accelerate")
    for whole, resumed in two_ranks.run(sharded, tmp_path):
        assert whole == resumed


def split_by_lightning(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Weights of both runs under Lightning's ModelParallelStrategy, which shards by FSDP2."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "tests"}
    module = example("lightning_train")

    class Sharded(module.Stories):
        def configure_model(self) -> None:
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def run(steps: int, saved: str | None = None) -> tuple[lightning.Trainer, dict[str, bytes]]:
        lightning.seed_everything(0, verbose=False)
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=size,
            strategy=ModelParallelStrategy(
                data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo"
            ),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
        )
        trained = Sharded(STEPS, in_backward=False)
        trainer.fit(trained, module.Batches(), ckpt_path=saved)
        return trainer, {name: bits(weight.full_tensor()) for name, weight in trained.named_parameters()}

    _, whole = run(4)
    interrupted, before = run(2)
    assert all(before[name] != weight for name, weight in whole.items())
    interrupted.save_checkpoint(folder / "saved")
    return whole, run(4, str(folder / "saved"))[1]


@pytest.mark.slow
def test_lightning_trains_and_resumes_with_weights_split(two_ranks, tmp_path):
    pytest.importorskip("lightning")
    for whole, resumed in two_ranks.run(split_by_lightning, tmp_path):
        assert whole == resumed
