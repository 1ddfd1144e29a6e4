"""Step weights inside the backward pass, a few at a time when their gradients are complete, and free the gradients."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from ..optimizer import ProjectedOptimizer
from .averaging import Averaging, checked_group
from .buckets import Buckets, gradient_bytes
from .checks import align_, call_on_gradient, check, is_compiled, is_swapped, rearm_, refuse_scalers, remove_all
from .clipping import PreviousNormClip

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def step_in_backward(
    model: nn.Module,
    optimizer: ProjectedOptimizer,
    *,
    clip_norm: float | None = None,
    group: "ProcessGroup | str | None" = None,
    accumulating: Callable[[], bool] | None = None,
) -> "InBackward":
    """Have `backward` step the weights, a few at a time when their gradients are complete, and free the gradients.

    The training loop stays as it is: `optimizer.step()` after the last backward of a batch applies gradients that are
    still there and makes ready for the next batch. Numbers are those of the ordinary mode, bit for bit.

    Args:
        model: Holds every parameter of the optimizer. Trainable ones that the optimizer does not have keep their
            gradients. Sharded first, where it is: by FSDP2, the optimizer built after it.
        optimizer: One of this library. Its `state_dict`, its options and its learning-rate scheduler work as usual.
        clip_norm: Scale gradients by `clip_norm / norm` where the global gradient norm of the *previous* batch
            exceeded it: this batch's is not known before its last gradient. The first batch is not clipped.
        group: Ranks that train the model together, each on its own data: a process group, or "world" for all. They
            begin with the first one's weights and buffers, and every gradient is averaged over them, while backward
            goes on, before its weight is stepped. Not beside DistributedDataParallel, but instead of it.
        accumulating: Asked in every backward whether it is not the last of its batch, for loops that are not yours to
            put `handle.accumulate()` into. Under accelerate: `lambda: not accelerator.sync_gradients`.

    Returns:
        A handle: `with handle.accumulate():` around every backward of a batch but the last, and `handle.remove()` for
        the ordinary mode.

    Examples:
        >>> from apollo_optim import APOLLOMini
        >>> model = torch.nn.Linear(64, 256)
        >>> optimizer = APOLLOMini(model, lr=1e-2)
        >>> handle = step_in_backward(model, optimizer)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """
    check(model, optimizer, clip_norm, group, accumulating)
    ranks = checked_group(group)
    if ranks is not None:
        align_(model, optimizer, ranks, clip_norm)
    return InBackward(model, optimizer, clip_norm, ranks, accumulating)


class InBackward:
    """The handle of `step_in_backward`: says which backwards only accumulate, and gives the ordinary mode back."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ProjectedOptimizer,
        clip_norm: float | None,
        ranks: "ProcessGroup | None",
        accumulating: Callable[[], bool] | None,
    ):
        self._optimizer = optimizer
        self._clip = None if clip_norm is None else PreviousNormClip(optimizer, clip_norm)
        self._averaging = None if ranks is None else Averaging(ranks, model, self._gather_)
        self._accumulating = False
        self._asked = accumulating
        self._task: int | None = None
        """Autograd's id of the backward that has stepped weights since the last `optimizer.step()`."""
        self._end: weakref.ref[partial[None]] | None = None
        """The call that autograd makes at the end of that backward, and holds until then; gone if it has failed.

        None where it makes no such call: after it, with averaging, and under compiled autograd, which drops it.
        """
        self._taken: set[int] = set()
        """Ids of weights that it has stepped, or sent the gradient of to other ranks."""
        self._buckets: dict[torch.device, Buckets] = {}
        """Buckets of each device, because autograd goes through each in a thread of its own."""
        weights = [weight for weight in optimizer._weights() if weight.requires_grad]
        # Autograd's hooks are out of the garbage collector's sight: a circle through them would never be freed.
        handle = weakref.ref(self)
        hooks = [weight.register_post_accumulate_grad_hook(partial(call_on_gradient, handle)) for weight in weights]
        if any(map(is_swapped, weights)):
            hooks.append(model.register_forward_pre_hook(rearm_))
        self._hooks = [*hooks, optimizer.register_step_pre_hook(refuse_scalers)]
        self._beginning = threading.Lock()
        weakref.finalize(self, remove_all, hooks)
        optimizer._plans.forget()
        optimizer._step_override = self._finish
        # Else torch.amp.GradScaler would miss the gradients with a bare assertion, and not come as far as our refusal.
        optimizer._step_supports_amp_scaling = True

    def __reduce__(self) -> NoReturn:
        """Refuse `copy` and `pickle`, which ask for this."""
        raise TypeError(
            "a handle of step_in_backward belongs to its model and cannot be copied: copy model and optimizer, as by "
            "copy.deepcopy((model, optimizer)), and call step_in_backward with the copies"
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let the backward passes inside only add to the gradients, which then stay until the batch's last backward."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def remove(self) -> None:
        """Give the ordinary mode back: gradients stay, and `optimizer.step()` applies them."""
        if not self._hooks:
            return
        if self._averaging is not None and self._task is not None:
            # Gradients that are on their way have nobody else to apply them.
            with torch.no_grad():
                self._finish()
        remove_all(self._hooks)
        self._hooks = []
        # They refer to this handle, and so to the optimizer.
        self._buckets.clear()
        self._averaging = None
        if self._clip is not None:
            self._clip.remove()
        self._optimizer._plans.forget()
        self._optimizer._step_override = None
        self._optimizer._step_supports_amp_scaling = False

    def on_gradient(self, weight: Tensor) -> None:
        """Autograd's call, once in a backward for each leaf, when all contributions to its gradient are added up."""
        task = torch._C._current_graph_task_id()
        accumulating = self._accumulating or (self._asked is not None and self._asked())
        if task != self._task:
            # Several devices have a thread each.
            with self._beginning:
                if task != self._task:
                    self._begin(task, weight, accumulating)
        if accumulating:
            return
        if self._averaging is None:
            self._gather_(weight)
        else:
            self._taken.add(id(weight))
            self._averaging.add(weight)

    def _begin(self, task: int, weight: Tensor, accumulating: bool) -> None:
        """Check that another backward may come, and note that it did."""
        if self._end is not None and self._end() is None:
            self._give_up()
        if accumulating and self._task is None:
            return
        if not accumulating and torch.is_grad_enabled():
            raise RuntimeError(
                "step_in_backward cannot go with backward(create_graph=True): the weights would be stepped away from "
                "under the gradients of their gradients"
            )
        if self._task is not None:
            if id(weight) in self._taken or id(weight) in self._waiting():
                weight.grad = None
            raise RuntimeError(
                "a second backward came before optimizer.step(), and the first has already stepped the weights. Call "
                "optimizer.step() after the last backward of every batch, and put the others inside "
                "`with handle.accumulate():`. Reentrant activation checkpointing runs a backward inside another one: "
                "use torch.utils.checkpoint(..., use_reentrant=False), or "
                'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
            )
        self._make_ready()
        if self._averaging is None:
            flush = partial(self._flush)
            torch.autograd.Variable._execution_engine.queue_callback(flush)
            self._end = None if is_compiled() else weakref.ref(flush)
        self._task = task

    def _give_up(self) -> None:
        """Forget a batch that has failed: what waits in buckets stays in the weights' gradients."""
        self._task = self._end = None
        self._taken.clear()
        self._buckets.clear()
        if self._clip is not None:
            self._clip.forget()

    def _make_ready(self) -> None:
        """Forget the previous batch."""
        self._optimizer._plans.last = []
        if self._averaging is not None:
            self._averaging.begin(self._optimizer._weights())

    def _gather_(self, weight: Tensor) -> None:
        """Put the weight's gradient into its bucket, which is stepped once it is complete."""
        device = weight.device
        buckets = self._buckets.get(device)
        if buckets is None:
            trained = [other for other in self._optimizer._weights() if other.requires_grad and other.device == device]
            largest = max(map(gradient_bytes, [weight, *trained]))
            buckets = self._buckets[device] = Buckets(device, largest, self._step_)
        buckets.add(weight)

    @torch._disable_dynamo
    @torch.no_grad()
    def _flush(self) -> None:
        """Step whatever waits: autograd's call at the end of a backward, unless it has failed."""
        had_new = [buckets.flush() for buckets in self._buckets.values()]
        if any(had_new):
            # What has stepped weights by themselves is not needed again, and its scratch would leave others without.
            self._optimizer._plans.forget_parts()
        self._end = None

    def _waiting(self) -> set[int]:
        """Ids of weights whose gradients are in buckets."""
        return {id(weight) for buckets in self._buckets.values() for weight in buckets.waiting()}

    def _step_(self, weights: list[Tensor]) -> None:
        if self._clip is not None:
            for weight in weights:
                self._clip.clip_(weight)
        self._taken.update(map(id, weights))
        try:
            self._optimizer._step_part_(weights)
        finally:
            for weight in weights:
                weight.grad = None

    def _finish(self) -> None:
        """`optimizer.step()` in this mode: apply what is left, and make ready for the next batch."""
        if self._task is None:
            self._make_ready()
        weights = self._optimizer._weights()
        waiting = self._waiting()
        left = [weight for weight in weights if weight.grad is not None and id(weight) not in waiting]
        for weight in left:
            if id(weight) in self._taken:
                raise RuntimeError(
                    f"a weight {tuple(weight.shape)} has a gradient again, after backward has stepped it: something "
                    "else writes gradients, as DistributedDataParallel around the model does. It does not go with "
                    "step_in_backward"
                )
        if self._averaging is None:
            try:
                # As backward would bring them.
                for weight in reversed(left):
                    self._gather_(weight)
                self._flush()
            except BaseException:
                self._give_up()
                raise
        else:
            reordered = self._averaging.finish(weights, left)
            self._flush()
            if reordered:
                self._buckets.clear()
        if self._clip is not None:
            self._clip.advance()
        self._task = None
        self._taken.clear()
