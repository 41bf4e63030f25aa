"""The runners of a model that is divided among ranks on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastgen.core.step_output import EagerReason, StepOutput
from fastgen.model.step_input import StepInput
from fastgen.runner.gpu_runner import GPURunner, GPUTicket, StepResults
from fastgen.runner.graphs import ForwardPass
from fastgen.runner.interface import Mask
from fastgen.runner.ranks.messages import IntArray, MessageKind, pack, unpack
from fastgen.runner.ranks.ring import Ring
from fastgen.runner.ranks.runners import RankWatch
from fastgen.settings import EngineConfig

# Between two looks for the results of a step. Waiting for the GPU itself could not be interrupted when a rank ends.
_POLL_SECONDS = 100e-6


class RankedGPURunner(GPURunner):
    """Rank 0: tells the other ranks each step, computes its part of it, and samples.

    Args:
        num_parameters: of the whole model.
        ring: through which the others get their steps.
        watch: of the others.
        given: as for `GPURunner`.
    """

    def __init__(self, *given: Any, num_parameters: int, ring: Ring, watch: RankWatch, **more: Any) -> None:
        super().__init__(*given, **more)
        self.num_parameters = num_parameters
        self._ring = ring
        self._watch = watch

    def prepare_for(self, config: EngineConfig, progress: Callable[[float], None]) -> None:
        """Capture the graphs of steps of up to the token budget on all ranks."""
        with self._watch.guard():
            self._publish(np.array([MessageKind.PREPARE, config.most_tokens], np.int32))
            super().prepare_for(config, progress)

    def check(self) -> None:
        """Raise RankFailed if another rank has failed."""
        self._watch.check()

    def end(self) -> None:
        """Let the other ranks end."""
        self._publish(np.array([MessageKind.END], np.int32))

    def launch(self, step: StepInput) -> GPUTicket:
        """Publish the step, and enqueue it with the other ranks."""
        with self._watch.guard():
            return super().launch(step)

    def sample(self, step: StepInput, forward: ForwardPass, masks: list[Mask]) -> StepResults:
        """Enqueue the sampling, and that the tokens are sent to the other ranks."""
        with self._watch.guard():
            return super().sample(step, forward, masks)

    def wait(self, results: StepResults, eager_reason: EagerReason | None) -> StepOutput:
        """Wait for the results of a step, as long as no rank fails."""
        with self._watch.guard():
            while not results.have_arrived:
                self.check()
                time.sleep(_POLL_SECONDS)
            self.check()  # the group may have been aborted, which leaves nonsense
            return super().wait(results, eager_reason)

    def _admit(self, step: StepInput) -> None:
        super()._admit(step)
        # Only this rank knows the sampling parameters; but all must launch the same graphs.
        self._publish(pack(step, MessageKind.STEP_WITH_LISTS if self._needs_lists(step) else MessageKind.STEP))

    def _publish(self, message: IntArray) -> None:
        self._ring.publish(message, self.check)


class FollowingGPURunner(GPURunner):
    """Another rank: computes its part of rank 0's steps, and learns the tokens from it.

    Args:
        config: the engine's settings.
        ring: through which it gets its steps.
        given: as for `GPURunner`.
    """

    def __init__(self, *given: Any, config: EngineConfig, ring: Ring, **more: Any) -> None:
        super().__init__(*given, **more)
        self._config = config
        self._ring = ring
        self._has_lists = False
        self._results: StepResults | None = None

    def follow(self) -> None:
        """Run rank 0's steps until it ends."""
        while True:
            message = self._ring.receive(self._group.rank - 1, self._check_device)
            match message[0]:
                case MessageKind.STEP | MessageKind.STEP_WITH_LISTS:
                    self._run_step(unpack(message), has_lists=message[0] == MessageKind.STEP_WITH_LISTS)
                case MessageKind.PREPARE:
                    config = replace(self._config, token_budget=int(message[1]))
                    self.prepare_for(config, lambda _fraction: None)
                case _:
                    return

    @torch.inference_mode()
    def _run_step(self, step: StepInput, *, has_lists: bool) -> None:
        self._has_lists = has_lists
        ticket = self.launch(step)
        self._results = self.sample(step, ticket.forward, [])

    def _needs_lists(self, step: StepInput) -> bool:  # noqa: ARG002 (rank 0 knows)
        return self._has_lists

    def _check_device(self) -> None:
        """Raise an error of the GPU while rank 0 waits for this rank, and sends no further step."""
        if self._results is not None:
            _ = self._results.have_arrived
