"""The parameters of a module under PyTorch's FSDP: each rank's shards, and whole parameters while they are gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple


class ShardedGroup(NamedTuple):
    """Parameters that FSDP gathers and frees together."""

    trainable: int  # elements of the whole parameters
    frozen: int
    shards: list[tuple[Any, bool]]  # this rank's parts, and whether they are trained
    gradients: list[Any]  # of these parts
    gathered: list[Any]  # whole parameters and gradients; their storage is empty while they are not gathered
    ranks: int  # that share the parameters
    reshards: bool  # frees the whole parameters after the forward
    dtype: Any  # in which it computes; None for the parameters' own


def find_groups(module: Any) -> list[ShardedGroup]:
    """Return the groups of a module, outermost first; empty without FSDP.

    Raises AttributeError and the like where this version of PyTorch keeps them otherwise.
    """
    return list(_iter_groups(module))


def _iter_groups(module: Any) -> Iterator[ShardedGroup]:
    for part in module.modules():
        if hasattr(type(part), "_get_fsdp_state"):
            state = part._get_fsdp_state()
            # Newer versions of PyTorch allow several, of parameters on different meshes.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in groups if groups is not None else [state._fsdp_param_group]:
                if group is not None:
                    yield _read_group(group)
        flat = getattr(getattr(part, "_handle", None), "flat_param", None)
        # A module inside of the one that FSDP wrapped has no handle of its own.
        if flat is not None and type(part).__name__ == "FullyShardedDataParallel":
            yield _read_flat(part._handle, flat)


def _read_group(group: Any) -> ShardedGroup:
    """Read a group of ``fully_shard`` (FSDP2)."""
    shards: list[tuple[Any, bool]] = []
    gathered, counts = [], {True: 0, False: 0}
    for parameter in group.fsdp_params:
        shard = parameter.sharded_param
        shards.append((shard, bool(shard.requires_grad)))
        counts[bool(shard.requires_grad)] += int(shard.numel())
        whole = getattr(parameter, "_unsharded_param", None)
        gathered += [*parameter.all_gather_outputs, getattr(parameter, "unsharded_accumulated_grad", None)]
        gathered.append(getattr(whole, "grad", None))
    return ShardedGroup(
        trainable=counts[True],
        frozen=counts[False],
        shards=shards,
        gradients=[shard.grad for shard, _ in shards],
        gathered=gathered,
        ranks=int(getattr(group.mesh_info, "shard_mesh_size", 1)),
        reshards=group.post_forward_mesh_info is not None,
        dtype=_find_policy(group).param_dtype,
    )


def _find_policy(group: Any) -> Any:
    """Return the mixed precision of a group of FSDP2; newer versions of PyTorch keep it with each parameter."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def _read_flat(handle: Any, flat: Any) -> ShardedGroup:
    """Read a flat parameter of ``FullyShardedDataParallel`` (FSDP1)."""
    originals = getattr(flat, "_params", None)
    needs_gradient = [p.requires_grad for p in originals] if originals else [flat.requires_grad] * len(flat._shapes)
    counts = {True: 0, False: 0}
    for trains, shape in zip(needs_gradient, flat._shapes):
        counts[bool(trains)] += math.prod(shape)
    names = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    return ShardedGroup(
        trainable=counts[True],
        frozen=counts[False],
        shards=[(getattr(flat, "_local_shard", None), bool(counts[True]))],
        gradients=[flat.grad, getattr(flat, "_saved_grad_shard", None)],
        gathered=[getattr(flat, name, None) for name in names],
        ranks=int(handle.world_size) if handle.uses_sharded_strategy else 1,
        reshards=str(handle._sharding_strategy).endswith(("FULL_SHARD", "HYBRID_SHARD")),
        dtype=handle._fwd_bwd_param_dtype if handle._uses_param_mixed_precision else None,
    )
