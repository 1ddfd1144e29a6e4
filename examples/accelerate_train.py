"""Train a small LLaMA with APOLLO under accelerate: in one process, in several (DDP), or sharded (FSDP2).

    accelerate launch --num_processes 2 examples/accelerate_train.py --out runs/accelerate
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        examples/accelerate_train.py --out runs/sharded

A second time with `--resume` it goes on from the last checkpoint, bit for bit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from apollo_optim import APOLLO

TEXT = Path(__file__).with_name("stories.txt")
LENGTH = 64


def main(argv: Sequence[str] | None = None) -> LlamaForCausalLM:
    """Train as the arguments say; returns the model, as accelerate has prepared it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, help="save and end after so many steps, as an interrupted run would")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(argv)

    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=options.accumulate)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = APOLLO(model, lr=1e-2)  # from the model, before it is prepared: embedding and head are left to AdamW
    scheduler = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)

    tokens = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    batches = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    # The scheduler is not prepared: that would step it once for every process.
    accelerator.register_for_checkpointing(scheduler)

    step, saved = 0, options.out / "checkpoint"
    if options.resume:
        accelerator.load_state(str(saved))
        step = scheduler.last_epoch
    for batch in accelerator.skip_first_batches(batches, step * options.accumulate):
        if step >= (options.stop_after or options.steps):
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            step += 1
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.save_state(str(saved))
    return model


if __name__ == "__main__":
    main()
