"""Hashes of weights and state after 50 steps, for every rule and dtype: what a refactoring leaves as it is.

    python tests/fingerprints.py [--device cpu|cuda] [--path plain|fused|auto] [--only SUBSTRING] [--output FILE]

Run it before and after a refactoring, on the same machine, and compare the files. It uses public names of the package
only. On the CPU the fused path runs in Triton's interpreter (set TRITON_INTERPRET=1), with fewer and smaller weights.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apollo_optim import (
    APOLLO,
    APOLLOMini,
    Artemis,
    ArtemisMini,
    FactoredAdamW,
    Fira,
    Flora,
    GaLore,
    StructuredAdamW,
    step_in_backward,
)
from apollo_optim.quant import quantize_weights_

STEPS = 50
REFRESH_EVERY = 16

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "apollo": (APOLLO, {"rank": 4}),
    "apollo-1": (APOLLO, {"rank": 1}),
    "apollo-20": (APOLLO, {"rank": 20}),
    "apollo-tensor": (APOLLO, {"rank": 4, "granularity": "tensor"}),
    "apollo-svd": (APOLLO, {"rank": 4, "projection": "svd"}),
    "apollo-svd-lowrank": (APOLLO, {"rank": 4, "projection": "svd_lowrank"}),
    "mini": (APOLLOMini, {}),
    "mini-svd": (APOLLOMini, {"projection": "svd"}),
    "structured-channel": (StructuredAdamW, {}),
    "structured-tensor": (StructuredAdamW, {"granularity": "tensor"}),
    "structured-element": (StructuredAdamW, {"granularity": "element"}),
    "galore": (GaLore, {"rank": 4}),
    "galore-gaussian": (GaLore, {"rank": 4, "projection": "gaussian"}),
    "fira": (Fira, {"rank": 4}),
    "fira-gaussian": (Fira, {"rank": 4, "projection": "gaussian"}),
    "flora": (Flora, {"rank": 4}),
    "flora-svd": (Flora, {"rank": 4, "projection": "svd"}),
    "adamw": (APOLLO, {"rank": None}),
    "rowwise": (APOLLO, {"rank": None, "second_moment": "rowwise"}),
    "rowwise-no-momentum": (APOLLO, {"rank": None, "second_moment": "rowwise", "betas": (0.0, 0.999)}),
    "adafactor": (APOLLO, {"rank": None, "second_moment": "factored", "betas": (0.0, 0.999)}),
    "factored-adamw": (FactoredAdamW, {}),
    "artemis": (Artemis, {}),
    "artemis-mini": (ArtemisMini, {"rank": 4}),
}

Dtypes = tuple[torch.dtype, Any]
WIDE: list[Dtypes] = [(torch.float64, torch.float32), (torch.float32, torch.float64)]
NARROW: list[Dtypes] = [
    (weight, state)
    for weight in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    for state in (torch.float32, torch.bfloat16, torch.int8)
]
# The interpreter takes some ten seconds for a run: few rules and dtypes, so that every kernel is in one of them.
INTERPRETED: dict[str, list[Dtypes]] = {
    "apollo": [(torch.float32, torch.float32), (torch.int8, torch.int8)],
    "apollo-tensor": [(torch.bfloat16, torch.bfloat16)],
    "apollo-svd": [(torch.float32, torch.float32)],
    "mini": [(torch.float16, torch.int8)],
    "structured-channel": [(torch.float32, torch.float32)],
    "adamw": [(torch.float32, torch.float32), (torch.float16, torch.bfloat16)],
    "rowwise": [(torch.float32, torch.int8)],
    "galore": [(torch.float32, torch.float32)],
    "adafactor": [(torch.float32, torch.float32)],
    "artemis": [(torch.float32, "nf4")],
    "artemis-mini": [(torch.float32, torch.float32)],
}

LARGE_SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (37, 61),
    "tall": (208, 96),
    "square": (128, 128),
    "experts": (3, 9, 24),
    "conv": (8, 4, 3, 3),
    "vector": (3000,),
    "scalar": (),
}
SHAPES: dict[str, tuple[int, ...]] = {"wide": (37, 61), "tall": (40, 25), "experts": (3, 9, 24), "vector": (300,)}
FEW_SHAPES: dict[str, tuple[int, ...]] = {"wide": (9, 24), "vector": (5,)}


@dataclass(frozen=True)
class Case:
    """One run."""

    rule: str
    dtypes: Dtypes
    device: str
    path: str
    mode: str = "step"
    """"step", "sparse" where weights have no gradient now and then, "capturable", "maximize", or "backward"."""

    @property
    def name(self) -> str:
        weight, state = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.device}/{self.path}/{self.rule}/{weight}-{state}/{self.mode}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.device == "cuda":
            return LARGE_SHAPES
        if self.path == "plain":
            return SHAPES
        return FEW_SHAPES


class Weights(nn.Module):
    """Weights of the given shapes; matrices are those of linear layers, so that they can be int8."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(number)
            value = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            if len(shape) == 2:
                layer = nn.Linear(shape[1], shape[0], bias=False)
                layer.weight = value
                self.add_module(name, layer)
            else:
                self.register_parameter(name, value)


def gradient(number: int, step: int, like: Tensor) -> Tensor:
    """The gradient of the weight of this number at this step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def fingerprint(case: Case) -> dict[str, str]:
    """Hashes of the weights and of the state after a run."""
    kind, options = RULES[case.rule]
    narrow = case.dtypes[0] == torch.int8
    model = Weights(case.shapes, torch.float32 if narrow else case.dtypes[0])
    if narrow:
        quantize_weights_(model, group_size=16)
    model.to(case.device)
    named = list(model.named_parameters())
    group = {"params": named, "refresh_every": REFRESH_EVERY}
    group |= {key: options[key] for key in ("second_moment",) if key in options}
    optimizer = kind(
        [group],
        lr=0.01,
        weight_decay=0.1,
        state_dtype=case.dtypes[1],
        fused={"plain": False, "fused": True, "auto": None}[case.path],
        **{key: value for key, value in options.items() if key != "second_moment"},
        **({case.mode: True} if case.mode in ("capturable", "maximize") else {}),
    )
    handle = step_in_backward(model, optimizer) if case.mode == "backward" else None
    for step in range(STEPS):
        optimizer.zero_grad()
        present = {}
        for number, (_, weight) in enumerate(named):
            if case.mode != "sparse" or step % (number + 2) != 1:
                present[weight] = gradient(number, step, weight)
        if handle is not None:
            torch.stack([(weight * grad).sum() for weight, grad in present.items()]).sum().backward()
        else:
            for weight, grad in present.items():
                weight.grad = grad
        if step == 20:  # a gradient that is refused
            next(iter(present.values())).view(-1)[3] = float("nan")
        optimizer.step()
    state = optimizer.state_dict()["state"]
    kept = {f"{index}.{name}": value for index in sorted(state) for name, value in sorted(state[index].items())}
    return {"weights": hashed(model.state_dict()), "state": hashed(kept), "skipped": str(optimizer.skipped())}


def hashed(tensors: dict[str, Tensor]) -> str:
    """One hash of names, shapes, dtypes and every bit."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        digest.update(repr((name, tuple(plain.shape), plain.dtype)).encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cases(device: str, path: str) -> Iterator[Case]:
    """All that this device and path are pinned by."""
    interpreted = (device, path) == ("cpu", "fused")
    for rule in RULES:
        usual = Case(rule, (torch.float32, torch.float32), device, path)
        everything = [
            *NARROW,
            *(WIDE if path == "plain" else []),
            *([(torch.float32, "nf4")] if rule == "artemis" else []),
        ]
        for dtypes in INTERPRETED.get(rule, []) if interpreted else everything:
            yield replace(usual, dtypes=dtypes)
        if interpreted and rule == "apollo":
            yield replace(usual, mode="sparse")
        elif not interpreted and rule in ("apollo", "adamw", "mini", "fira", "flora"):
            for mode in ("sparse", "capturable", "maximize", "backward"):
                yield replace(usual, mode=mode)


def hasten_interpreter() -> None:
    """Give Triton's language its interpreted meaning once, and not at each call, and let nothing look for overflow."""
    import dataclasses
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--path", choices=("plain", "fused", "auto"), action="append", help="default: all there are")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--output", help="write the JSON here, not to the standard output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    there = {"cpu": ("plain", "fused") if interprets else ("plain",), "cuda": ("plain", "fused", "auto")}
    paths = arguments.path or there[arguments.device]
    if arguments.device == "cpu" and "fused" in paths:
        if not interprets:
            parser.error("on the CPU the fused path needs TRITON_INTERPRET=1")
        hasten_interpreter()
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        for case in cases(arguments.device, path):
            if arguments.only not in case.name:
                continue
            try:
                found[case.name] = fingerprint(case)
            except (RuntimeError, ValueError) as error:
                # A combination that is refused must stay refused.
                if isinstance(error, RuntimeError) and not str(error).startswith("fused=True, but"):
                    raise
                found[case.name] = {"refused": type(error).__name__}
            print(case.name, found[case.name], file=sys.stderr)
    text = json.dumps(found, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        with open(arguments.output, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
