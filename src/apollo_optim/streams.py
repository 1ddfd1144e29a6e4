"""Which stream the work of a device is queued on, asked many times in a step."""

import torch


def gpu_number(device: torch.device) -> int | None:
    """Of a device with streams of CUDA."""
    return device.index if device.type == "cuda" else None


def raw_stream(gpu: int | None) -> int:
    """The current stream's address, as `torch.cuda.current_stream(gpu).cuda_stream` is, but sooner; 0 without one."""
    return 0 if gpu is None else torch._C._cuda_getCurrentRawStream(gpu)
