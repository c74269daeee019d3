"""DeepSpeed's own estimates of memory needs, and the rule of thumb.

The estimates are those of ``estimate_zero2_model_states_mem_needs`` (deepspeed/runtime/zero/stage_1_and_2.py) and
``estimate_zero3_model_states_mem_needs`` (stage3.py), the same from DeepSpeed 0.14 to 0.19, documented at
https://deepspeed.readthedocs.io/en/latest/memory.html. They assume 16-bit training with Adam, ignore activations and
exist for stages 2 and 3 only. In bytes, with P parameters, L of them in the largest layer, g GPUs on each of n nodes,
N = g n, and a factor f for additional buffers (1.5):

==================================================  =====================  ============================================
options                                             each GPU               host, each node
==================================================  =====================  ============================================
stage 2, optimizer on the CPU                       2 P                    P max(4 N, 16) f
stage 2                                             2 P + 18 P / N         4 P g f
stage 3, optimizer and parameters on the CPU        4 L                    18 P / n f, without zero.Init at least 4 P g f
stage 3, optimizer on the CPU                       4 L + 2 P / N          16 P / n f, without zero.Init at least 4 P g f
stage 3                                             4 L + 18 P / N         4 L g f, without zero.Init 4 P g f
==================================================  =====================  ============================================

The 18 bytes of stage 2 are 2 for 16-bit gradients, 4 for 32-bit ones, 4 for master weights and 8 for Adam's moments.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 1.5
"""DeepSpeed's additional_buffer_factor."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One row of DeepSpeed's table of estimates."""

    stage: int  # 2 or 3
    offload_optimizer: bool
    offload_parameters: bool
    zero_init: bool | None  # the model is constructed under deepspeed.zero.Init; None where that makes no difference
    gpu_bytes: int  # each GPU
    host_bytes: int  # each node

    @property
    def option_text(self) -> str:
        """The row's name in DeepSpeed's table."""
        parts = [f"offload_param={'cpu' if self.offload_parameters else 'none'}"] if self.stage == 3 else []
        parts.append(f"offload_optimizer={'cpu' if self.offload_optimizer else 'none'}")
        parts += [f"zero_init={int(self.zero_init)}"] if self.zero_init is not None else []
        return ", ".join(parts)


def estimate_zero2(parameters: int, *, gpus: int = 1, nodes: int = 1, factor: float = FACTOR) -> tuple[Estimate, ...]:
    """Return both rows of stage 2, for ``gpus`` on each of ``nodes``."""
    world = gpus * nodes
    host_offloaded = int(parameters * max(4 * world, 16) * factor)
    host = int(parameters * 4 * gpus * factor)
    return (
        Estimate(2, True, False, None, 2 * parameters, host_offloaded),
        Estimate(2, False, False, None, 2 * parameters + int(18 * parameters / world), host),
    )


def estimate_zero3(
    parameters: int, largest_layer: int, *, gpus: int = 1, nodes: int = 1, factor: float = FACTOR
) -> tuple[Estimate, ...]:
    """Return all six rows of stage 3; ``largest_layer`` is the count of its parameters."""
    return tuple(
        _estimate_zero3(parameters, largest_layer, gpus, nodes, factor, options)
        for options in (
            (True, True, True),
            (True, True, False),
            (True, False, True),
            (True, False, False),
            (False, False, True),
            (False, False, False),
        )
    )


def _estimate_zero3(
    parameters: int, largest_layer: int, gpus: int, nodes: int, factor: float, options: tuple[bool, bool, bool]
) -> Estimate:
    optimizer, weights, zero_init = options
    world, share, layer = gpus * nodes, 1 / nodes, 4 * largest_layer
    if optimizer:
        each = 18 if weights else 16
        gpu = layer + (0 if weights else int(2 * parameters / world))
        host = parameters * (each * share if zero_init else max(4 * gpus, each * share)) * factor
    else:
        gpu = layer + int(18 * parameters / world)
        host = (largest_layer if zero_init else parameters) * 4 * gpus * factor
    return Estimate(3, optimizer, weights, zero_init, gpu, int(host))


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """The rule of thumb for a GPU's peak: ``parameters + optimizer + max(gradients + intermediates, activations)``.

    Activations are freed as the backward makes gradients, so that only the larger of the two sums counts.
    """

    parameters: int
    optimizer: int  # master weights and state
    gradients: int
    intermediates: int  # what the update needs in addition
    activations: int  # the forward's results for the backward, and its temporaries

    @property
    def peak_bytes(self) -> int:
        """The rule's result."""
        return self.parameters + self.optimizer + max(self.gradients + self.intermediates, self.activations)
