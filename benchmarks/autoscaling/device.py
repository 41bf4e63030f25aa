"""Step times and capacities of the simulated engines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastgen.core.step_times import StepCoefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device whose steps take times of these coefficients exactly; the real engine has to measure them.

    Attributes:
        base, token, kv_token, context_pair: as in `fastgen.core.step_times.StepCoefficients`.
        token_budget, max_sequences: the engine's settings.
        kv_tokens: capacity of the KV cache in tokens.
        steps_in_flight: steps that the engine launches before the results of the first are read.
    """

    name: str
    base: float
    token: float
    kv_token: float
    token_budget: int
    max_sequences: int
    kv_tokens: int
    steps_in_flight: int = 1
    context_pair: float = 0.0

    @property
    def coefficients(self) -> StepCoefficients:
        """The coefficients of its step times."""
        return StepCoefficients(**{name: getattr(self, name) for name in StepCoefficients._fields})

    def slowed(self, factor: float) -> Device:
        """Return a device whose steps take `factor` times as long."""
        return replace(self, **{name: factor * value for name, value in self.coefficients._asdict().items()})


# A roofline, not a measurement: a model of 8.03e9 parameters in bfloat16 with 32 layers of 8 KV heads of 128 (the shape
# of Llama 3.1 8B), on one A100 80 GB SXM (NVIDIA's data sheet: 312 TFLOP/s, 2039 GB/s), of which 60 % and 80 % are
# reached. base: 16.06 GB of weights read; token: 2 operations per parameter; kv_token: 131,072 bytes of keys and values
# read. The KV cache has what 90 % of the memory leaves beside the weights and 3 GB of activations. The budget is the
# power of two next to 95 % of the peak throughput, which is 19 * base / token tokens. context_pair is omitted: 4
# operations for each of 4096 numbers in each of 32 layers take 2.8e-9 s, 3 % of a token's time at a context of 1000
# tokens. The traces' mean prompts have 1155 and 2048.
A100_8B = Device(
    name="8B on an A100 (roofline)",
    base=0.00985,
    token=0.0000858,
    kv_token=8.04e-8,
    token_budget=2048,
    max_sequences=256,
    kv_tokens=400_000,
)

# Steps of SmolLM2-135M in float32 on two cores, from `benchmarks/chunking.py`: least-squares fit of the relative errors
# over its table, at most 6 % off. The cost of resident tokens was not measured and is omitted.
CPU_135M = Device(
    name="135M on two CPU cores (measured)",
    base=0.0403,
    token=0.00104,
    kv_token=0.0,
    token_budget=256,
    max_sequences=256,
    kv_tokens=64_000,
)
