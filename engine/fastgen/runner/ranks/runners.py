"""The runners of a model that is divided among ranks on CPUs; `gpu_runners` has those of GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from fastgen.core.step_output import StepOutput
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.rank_group import RankGroup
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Mask
from fastgen.runner.ranks.messages import MessageKind, pack, unpack
from fastgen.runner.ranks.ring import Ring
from fastgen.runner.runner import HostTicket, Model, ModelRunner


class RankWatch(Protocol):
    """Watches the other ranks for rank 0."""

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""

    def guard(self) -> AbstractContextManager[None]:
        """Return a context for work with the other ranks: an error in it ends them, and becomes RankFailed."""


class RankedRunner(ModelRunner):
    """Rank 0: tells the other ranks each step, computes its part of it, and samples.

    Args:
        model: rank 0's part of a model.
        cache: the keys and values of its heads.
        max_model_length: as in `Runner`.
        num_parameters: of the whole model.
        group: all ranks.
        ring: through which the others get their steps.
        watch: of the others.
    """

    def __init__(
        self,
        model: Model[ForwardInput],
        cache: KVCache,
        *,
        max_model_length: int,
        num_parameters: int,
        group: RankGroup,
        ring: Ring,
        watch: RankWatch,
    ) -> None:
        super().__init__(model, cache, max_model_length=max_model_length)
        self.num_parameters = num_parameters
        self._watch = watch
        self._group = group
        self._ring = ring

    def start_prefault(self) -> None:
        """Prefault the caches of all ranks."""
        with self._watch.guard():
            self._ring.publish(np.array([MessageKind.PREFAULT], np.int32), self.check)
        super().start_prefault()

    def check(self) -> None:
        """Raise RankFailed if another rank has failed."""
        self._watch.check()

    def end(self) -> None:
        """Let the other ranks end."""
        self._ring.publish(np.array([MessageKind.END], np.int32), self.check)

    def launch(self, step: StepInput) -> HostTicket:
        """Publish the step and compute it with the other ranks."""
        with self._watch.guard():
            self._ring.publish(pack(step), self.check)
            return super().launch(step)

    def sample(self, step: StepInput, hidden: torch.Tensor, masks: list[Mask]) -> StepOutput:
        """Sample, and send the tokens to the other ranks."""
        with self._watch.guard():
            output = super().sample(step, hidden, masks)
            self._group.broadcast(torch.tensor(output.token_ids, dtype=torch.int64))
            return output


class FollowingRunner(ModelRunner):
    """Another rank: computes its part of rank 0's steps, and learns the tokens from it."""

    def __init__(
        self, model: Model[ForwardInput], cache: KVCache, *, max_model_length: int, group: RankGroup, ring: Ring
    ) -> None:
        super().__init__(model, cache, max_model_length=max_model_length)
        self._group = group
        self._ring = ring

    def follow(self) -> None:
        """Run rank 0's steps until it ends."""
        while True:
            message = self._ring.receive(self._group.rank - 1)
            match message[0]:
                case MessageKind.STEP:
                    self.launch(unpack(message)).sample([])
                case MessageKind.PREFAULT:
                    self.start_prefault()
                case _:
                    return

    @torch.inference_mode()
    def sample(self, step: StepInput, hidden: torch.Tensor, masks: list[Mask]) -> StepOutput:  # noqa: ARG002 (rank 0's)
        """Compute this rank's part of the logits that rank 0 needs, and receive the tokens."""
        num_sampled, num_scored = len(step.sampled), len(step.scored_tokens)
        self._model.head(hidden[:num_sampled])
        for rows in torch.split(hidden[num_sampled : num_sampled + num_scored], ROWS_SAMPLED_AT_ONCE):
            self._model.head(rows)
        tokens = self._group.broadcast(torch.empty(num_sampled, dtype=torch.int64))
        self._rows.last_ids[step.rows[step.sampled]] = tokens.numpy()
        return StepOutput(tokens.tolist())
