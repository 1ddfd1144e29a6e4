"""APOLLO in torchtitan's optimizer container, and its checkpoints: `torch.distributed.checkpoint`, state by name.

    python examples/torchtitan_train.py --out runs/titan
    python examples/torchtitan_train.py --out runs/titan --resume

In a torchtitan trainer, `apollo_config(...)` is the `optimizer` of its configuration.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from transformers import LlamaConfig, LlamaForCausalLM

from apollo_optim import APOLLO, APOLLOMini

TEXT = Path(__file__).with_name("stories.txt")
LENGTH = 64
OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {"APOLLO": APOLLO, "APOLLOMini": APOLLOMini}


class ApolloContainer(OptimizersContainer):
    """torchtitan's container, which also knows our optimizers by name."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The same options; as a class of its own it builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return OURS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


def apollo_config(optimizer_name: str = "APOLLO", **options: Any) -> ApolloContainer.Config:
    """Embeddings, head and norms for AdamW, without a rank; all else is projected.

    `fused=None` takes kernels where there are some.
    """
    options = {"lr": 1e-2, "fused": None, "foreach": None, **options}
    patterns = {r"embed|lm_head|^output\.|norm": {**options, "rank": None}, r".*": options}
    return ApolloContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=optimizer_name, optimizer_kwargs=given)
            for pattern, given in patterns.items()
        ],
        implementation="for-loop",
    )


def main(argv: Sequence[str] | None = None) -> LlamaForCausalLM:
    """Train as the arguments say; returns the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, help="save and end after so many steps, as an interrupted run would")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizers = ApolloContainer(apollo_config(), model_parts=[model])
    tokens = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    batches = tokens[: len(tokens) // (8 * LENGTH) * 8 * LENGTH].view(-1, 8, LENGTH)

    step, saved = 0, options.out / "checkpoint"
    if options.resume:
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "step": step}
        dcp.load(state, checkpoint_id=saved)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < (options.stop_after or options.steps):
        batch = batches[step % len(batches)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        step += 1
        print(f"step {step}: loss {loss.item():.3f}")
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict(), "step": step}, checkpoint_id=saved)
    return model


if __name__ == "__main__":
    main()
