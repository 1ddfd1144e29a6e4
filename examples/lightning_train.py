"""Train a small LLaMA with APOLLO-Mini in Lightning, by its automatic optimization.

    python examples/lightning_train.py --out runs/lightning
    python examples/lightning_train.py --out runs/lightning --resume

With `--in-backward` gradients are applied and freed inside backward. A run that was interrupted goes on bit for bit.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from apollo_optim import APOLLOMini, step_in_backward

TEXT = Path(__file__).with_name("stories.txt")
LENGTH = 64


class Batches:
    """Rows of bytes, eight at a time and in order. Lightning saves how many were read, and goes on there."""

    def __init__(self) -> None:
        tokens = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.batches = tokens[: len(tokens) // (8 * LENGTH) * 8 * LENGTH].view(-1, 8, LENGTH)
        self.read = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        while self.read < len(self):
            self.read += 1
            yield self.batches[self.read - 1]
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Stories(lightning.LightningModule):
    """A LLaMA that reads bytes."""

    def __init__(self, steps: int, in_backward: bool):
        super().__init__()
        self.save_hyperparameters()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        self.is_last_part = True

    def configure_optimizers(self) -> Any:
        optimizer = APOLLOMini(self.model, lr=5e-3)
        if self.hparams["in_backward"]:
            # Lightning's gradient_clip_val would find no gradients: clip_norm is that of the batch before.
            step_in_backward(self.model, optimizer, clip_norm=1.0, accumulating=lambda: not self.is_last_part)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        parts = self.trainer.accumulate_grad_batches
        self.is_last_part = (batch_idx + 1) % parts == 0 or self.trainer.is_last_batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss


def main(argv: Sequence[str] | None = None) -> Stories:
    """Train as the arguments say; returns the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, help="end after so many steps, as an interrupted run would")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step")
    parser.add_argument("--in-backward", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_steps=options.stop_after or options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=None if options.in_backward else 1.0,
        default_root_dir=options.out,
        callbacks=[ModelCheckpoint(options.out, save_last=True, every_n_train_steps=2)],
        logger=False,
        accelerator="auto",
        devices=1,
        enable_model_summary=False,
    )
    module = Stories(options.steps, options.in_backward)
    saved = options.out / "last.ckpt"
    trainer.fit(module, Batches(), ckpt_path=saved if options.resume else None)
    return module


if __name__ == "__main__":
    main()
