"""Compile the kernels of real plans for a GPU that need not be there; run by test_compile.py in a process of its own.

    python tests/ahead_of_time.py CAPABILITY [--few]

With `--few` one variant of each kernel, the first that the plans ask for; otherwise all of them. Prints one line
of JSON per variant: the kernel's name, the registers and bytes of stack that a thread of it takes, the instructions
of its longest loop, how many of its products may be overtaken by later loads, and what it is compiled for.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, StructuredAdamW
from apollo_optim.core.orthogonal import VECTOR, orthogonalize_
from apollo_optim.fused import launches as host_side
from apollo_optim.fused import matrix, products, rounding
from apollo_optim.fused.launches import CompiledLaunch
from apollo_optim.fused.sharded_step import ShardedFusedStep
from apollo_optim.fused.step import FusedStep
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import Int8Weight
from apollo_optim.quant.kernel import BLOCK, TRITON_TYPES, dequantize_kernel
from apollo_optim.stepping.collectives import in_lockstep

POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
SHAPES = (1152, 1280), (512, 384), (1300, 1100), (300, 501)
"""Rows that are whole vectors and rows that are not, channels that are columns or rows, and tiles of both sizes."""
INSTRUCTION_BYTES = 16
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may have, by compute capability."""


def int8(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same weights and gradients, as int8."""
    narrow = [nn.Parameter(Int8Weight.of(param, 128)) for param in params]
    for weight, param in zip(narrow, params, strict=True):
        weight.grad = param.grad
    return narrow


def parts(params: list[nn.Parameter], dim: int) -> list[nn.Parameter]:
    """The first of two ranks' parts of the same weights and gradients; the other rank is not there."""
    mesh = init_device_mesh("cpu", (2,))
    placed = []
    for param in params:
        assert param.grad is not None
        local, grad = (
            DTensor.from_local(
                tensor.chunk(2, dim)[0].contiguous(), mesh, [Shard(dim)], run_check=False,
                shape=param.shape, stride=param.stride(),
            )
            for tensor in (param.detach(), param.grad)
        )  # fmt: skip
        placed.append(nn.Parameter(local))
        placed[-1].grad = grad
    return placed


ROWWISE = {"rank": None, "second_moment": "rowwise", "state_dtype": "int8"}
FACTORED = {"rank": None, "second_moment": "factored"}
SKETCHED = {"projection": "svd_lowrank"}
BUILDS: list[Callable[[list[nn.Parameter]], ProjectedOptimizer]] = [
    lambda params: APOLLO([{"params": params, "rank": 64}], fused=False),
    lambda params: APOLLO([{"params": params, "rank": 256}], fused=False, state_dtype=torch.bfloat16),
    lambda params: APOLLOMini([{"params": params, "rank": 1}], fused=False),
    lambda params: APOLLO([{"params": params[2:], "rank": 64, **SKETCHED}], fused=False),
    lambda params: APOLLO([{"params": params, "rank": 256, **SKETCHED}], fused=False),
    lambda params: APOLLO([{"params": params[:1], "rank": 64, **SKETCHED}], fused=False, state_dtype=torch.bfloat16),
    lambda params: APOLLOMini([{"params": params, "rank": 1, **SKETCHED}], fused=False),
    lambda params: StructuredAdamW([{"params": params, "rank": 1}], fused=False),
    lambda params: APOLLO([{"params": params, "rank": None}], fused=False),
    lambda params: APOLLOMini([{"params": int8(params[3:]), "rank": 1}], fused=False),
    lambda params: APOLLO([{"params": int8(params[1:2]), "rank": 64}], fused=False),
    lambda params: APOLLO([{"params": int8(params[:1]), **ROWWISE}], fused=False),
    lambda params: APOLLO([{"params": params, **FACTORED}], fused=False),
    lambda params: APOLLO([{"params": int8(params[:1]), **FACTORED}], fused=False),
    lambda params: FactoredAdamW([{"params": params[::3]}], fused=False),
    lambda params: APOLLO([{"params": params[3:], "rank": None}], fused=False, state_dtype="int8"),
    lambda params: APOLLO([{"params": params[:1], "rank": 256}], fused=False, state_dtype="int8"),
    lambda params: APOLLOMini([{"params": params[3:], "rank": 1}], fused=False, state_dtype="int8"),
    lambda params: FactoredAdamW(params, fused=False),
    lambda params: FactoredAdamW(int8(params[:1]), fused=False),
    lambda params: FactoredAdamW(params[3:], fused=False, state_dtype="int8"),
    lambda params: Artemis([{"params": params[:1], "rank": 1}], fused=False),
    lambda params: Artemis([{"params": params[3:], "rank": 1}], fused=False, betas=(0.0, 0.98)),
    lambda params: ArtemisMini([{"params": params[1:2], "rank": 1 / 8}], fused=False),
    lambda params: APOLLO([{"params": parts(params, 0), "rank": 64}], fused=False),
    lambda params: APOLLO([{"params": parts(params, 1), "rank": 256}], fused=False, state_dtype=torch.bfloat16),
    lambda params: APOLLOMini([{"params": parts(params, 0), "rank": 1}], fused=False),
    lambda params: APOLLO([{"params": parts(params, 1), "rank": None}], fused=False),
    lambda params: APOLLO([{"params": parts(params[3:], 0), "rank": None}], fused=False, state_dtype="int8"),
    lambda params: FactoredAdamW(parts(params[::3], 0), fused=False),
    lambda params: FactoredAdamW(parts(params[:1], 1), fused=False),
    lambda params: APOLLOMini([{"params": parts(int8(params[3:]), 0), "rank": 1}], fused=False),
    lambda params: APOLLO([{"params": parts(int8(params[1:2]), 0), "rank": 64}], fused=False),
    lambda params: FactoredAdamW(parts(int8(params[:1]), 0), fused=False),
]


def signature(bound: CompiledLaunch, arguments: tuple[Any, ...]) -> dict[str, str]:
    """The types of a kernel's arguments, as the compiler names them."""
    types = {name: type_of(value) for name, value in zip(bound.kernel.arg_names, arguments, strict=False)}
    return types | dict.fromkeys(bound.constants, "constexpr")


def type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>"
    return POINTERS[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def compiled(bound: CompiledLaunch, arguments: tuple[Any, ...], capability: int) -> dict[str, Any]:
    """A kernel for these arguments, in every stage of its compilation."""
    # As at a launch: addresses, and numbers that 16 divides.
    divisible = [isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0) for value in arguments]
    aligned = {(i,): [["tt.divisibility", 16]] for i, divides in enumerate(divisible) if divides}
    source = ASTSource(bound.kernel, signature(bound, arguments), dict(bound.constants), aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=bound.options).asm


def overtaken(code: str) -> int:
    """Products that Hopper's tensor cores may still be at when what they read is overwritten.

    Such a product is not waited for until the next one, so each of its factors needs a buffer more than the loads that
    are under way. Triton gives it to those that nothing else reads; then the two have the same number of buffers.
    """
    buffers = {}
    for name, count in re.findall(r"(%\S+) = ttg.memdesc_index .*?memdesc<(\d+)x", code):
        buffers[name] = int(count)
    for name, seen_as in re.findall(r"(%\S+) = ttg.memdesc_trans (%\S+) ", code):
        buffers[name] = buffers.get(seen_as, 1)
    products = dict(re.findall(r"(%\S+) = ttng.warp_group_dot (%\S+, %\S+), ", code))
    unawaited = re.findall(r"ttng.warp_group_dot_wait (%[^\s,]+).*?pendings = [1-9]", code)
    factors = [products[product].split(", ") for product in unawaited]
    return sum(buffers.get(left, 1) != buffers.get(right, 1) for left, right in factors)


def usage(code: bytes) -> dict[str, int]:
    """What a thread of the kernel takes, and the instructions of its longest loop: whatever lies before a jump back."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        ask = [tool, "-res-usage", "-sass", file.name]
        printed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    jumps = re.findall(r"/\*([0-9a-f]{4,})\*/ .*?\bBRA\S* (?:.*, )?0x([0-9a-f]+)", printed)
    loop = max((int(at, 16) - int(to, 16)) // INSTRUCTION_BYTES + 1 for at, to in jumps)
    return {"registers": int(found[1]), "stack": int(found[2]), "loop": loop}


def launches(build: Callable[[list[nn.Parameter]], ProjectedOptimizer]) -> Iterator[tuple[CompiledLaunch, Any]]:
    """Every kernel that a step of this optimizer would launch, with its arguments."""
    recorded: list[tuple[CompiledLaunch, Any]] = []
    CompiledLaunch.__call__ = lambda self, *arguments: recorded.append((self, arguments))
    params = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = build(params)
    jobs = optimizer._weight_steps(optimizer.param_groups, optimizer._weights())
    addresses = [job.stored.data_ptr() for job in jobs], [job.grad.data_ptr() for job in jobs]
    skipped = torch.zeros((), dtype=torch.int64)
    if jobs[0].is_split:
        spread = ShardedFusedStep(jobs, skipped)
        spread.prepare_(addresses)
        in_lockstep(spread.steps())
    else:
        step = FusedStep(jobs, skipped)
        step.prepare_(addresses)
        step.step_()
    yield from recorded


def filled_up(directions: Tensor) -> Tensor:
    """Directions without numbers, with sides that are multiples of a vector, as on a card."""
    rows, columns = (-(-side // VECTOR) * VECTOR for side in directions.shape[-2:])
    return torch.empty(*directions.shape[:-2], rows, columns, dtype=directions.dtype, device="meta")


def making_whole() -> tuple[CompiledLaunch, Any]:
    """The kernel with which a layer reads an int8 weight."""
    weight = Int8Weight.of(torch.randn(64, 4096), 128)
    constants = {"N": 128, "T": TRITON_TYPES[torch.bfloat16], "BLOCK": BLOCK}
    value = torch.empty(64, 4096, dtype=torch.bfloat16)
    return CompiledLaunch(dequantize_kernel, 64, constants), (weight.codes, weight.scale, value, 4096, 32)


def rounding_at_random() -> Iterator[tuple[CompiledLaunch, Any]]:
    """The kernel that rounds what plain PyTorch has stepped: a whole weight, and a part of one."""
    value, position = torch.ones(4096), torch.arange(4096)
    for dtype in (torch.bfloat16, torch.float16):
        for placed in (False, True):
            launch = CompiledLaunch(rounding.round_kernel, 4, {"PLACED": placed, "BLOCK": rounding.BLOCK})
            yield launch, (value.to(dtype), value, position if placed else value, 1, -1, 4096)


def variants() -> dict[str, list[tuple[CompiledLaunch, Any]]]:
    """By the name of a kernel, each of its specialisations once, in the order in which the plans ask for them."""
    found: dict[str, dict[tuple[str, ...], tuple[CompiledLaunch, Any]]] = {}
    for bound, arguments in (making_whole(), *rounding_at_random(), *chain.from_iterable(map(launches, BUILDS))):
        key = str(bound.constants), str(bound.options), str(signature(bound, arguments))
        found.setdefault(bound.kernel.__name__, {}).setdefault(key, (bound, arguments))
    return {name: list(each.values()) for name, each in found.items()}


def main(capability: int, few: bool) -> None:
    matrix.shared_memory = lambda _: SHARED_MEMORY[capability]
    # As on such a card, where products are in bfloat16.
    products.product_tile = lambda _: products.COMPILED
    products.reads_by_descriptors = lambda _: capability >= 90
    matrix.product_dtype = lambda *_: torch.bfloat16
    # Which a CPU would multiply for minutes: what is launched can be told without numbers.
    host_side.orthogonalize_ = lambda directions, product: orthogonalize_(filled_up(directions), product)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name, each in variants().items():
        for bound, arguments in each[:1] if few else each:
            stages = compiled(bound, arguments, capability)
            line = {"kernel": name, **usage(stages["cubin"]), "overtaken": overtaken(stages["ttgir"])}
            line["for"] = " ".join(f"{constant}={value}" for constant, value in bound.constants.items())
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), "--few" in sys.argv)
