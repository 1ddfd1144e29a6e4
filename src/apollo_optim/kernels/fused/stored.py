"""Bases that state keeps: the host makes them of gradients, before the kernels of the same step project by them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..basis import refresh_by_host
from ..job import Job
from ..plain import renew_basis_

MOMENTS = "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"


class StoredBases:
    """Those of a set of weights, where there are any."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = [job for job in jobs if "basis" in job.state]

    def renew_(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> "list[Refused]":
        """Make all bases that begin after these steps of the groups; the weights whose gradients cannot begin one.

        Waits for the device where there is one to make, and only there.
        """
        if not self._jobs or all(step % group["refresh_every"] != 0 for group, step in zip(groups, steps, strict=True)):
            return []
        return [Refused(job) for job in self._jobs if refresh_by_host(job) and not renew_basis_(job)]


class Refused:
    """A weight whose state this step must leave as it was, as a plain step would: it is the next that begins its basis.

    The kernels do refuse a gradient that is not finite, but channels that are in order would have it in their moments.
    """

    def __init__(self, job: Job):
        self._step = job.state["step"]
        self._before = [(job.state[name], job.state[name].clone()) for name in MOMENTS if name in job.state]

    def restore_(self) -> None:
        """Undo what the kernels, and who counts their steps, have done to its state."""
        for moment, before in self._before:
            moment.copy_(before)
        self._step.sub_(1)
