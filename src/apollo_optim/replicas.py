"""Ranks that each hold the whole model (data parallelism), and everything that travels between them."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Replicas:
    """The ranks of a process group of more than one."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._size = dist.get_world_size(group)

    def begin_mean_(self, grad: Tensor) -> dist.Work:
        """Begin to replace a gradient by its mean over the ranks; it is there after `wait()` of what is returned.

        Divided before it is added up, as in DistributedDataParallel, whose numbers these are: half precision then
        overflows no sooner than on one rank.
        """
        work = dist.all_reduce(grad.mul_(1 / self._size), group=self._group, async_op=True)
        assert work is not None
        return work

    def maximum_(self, numbers: Tensor) -> Tensor:
        """`numbers`, replaced by the largest of any rank."""
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return numbers

    def first_(self, tensor: Tensor) -> Tensor:
        """`tensor`, replaced by the first rank's."""
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.first_(getattr(tensor, name))
            return tensor
        plain = tensor.detach().contiguous()
        dist.broadcast(plain, group=self._group, group_src=0)
        if plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(plain)
        return tensor

    def agree(self, facts: Iterable[Any], device: torch.device) -> bool:
        """Whether these read the same on all ranks."""
        digest = zlib.crc32(repr(list(facts)).encode())
        largest, minus_smallest = self.maximum_(torch.tensor([digest, -digest], device=device)).tolist()
        return largest == -minus_smallest


def replicas(group: dist.ProcessGroup | str | None) -> Replicas | None:
    """The ranks of a group, or of the "world"; None where there is one only."""
    if group is None:
        return None
    if not dist.is_initialized():
        raise ValueError(f"group={group!r} needs torch.distributed: call init_process_group() first, under torchrun")
    found = dist.group.WORLD if group == "world" else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f'group must be "world", a torch.distributed.ProcessGroup that this rank belongs to, or None, got {group!r}'
        )
    return Replicas(found) if dist.get_world_size(found) > 1 else None
