"""What is wrong with a dump: checksums, counts, identity, non-finite and all-zero states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import CorruptShardError, Dump, Ref, Tensors, to_float32


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: a sample's id, a shard, or the manifest.
        what: a sentence.
    """

    where: str
    what: str

    def to_json(self) -> dict[str, str]:
        """For ``--json``."""
        return asdict(self)


def verify(dump: Dump, progress: Callable[[int], None] = lambda _: None) -> list[Finding]:
    """Read every acknowledged sample of a dump and say what is wrong with it; an empty list is a good dump.

    Args:
        progress: called with the number of samples done.
    """
    findings = [Finding("manifest", problem) for problem in dump.problems]
    bad_shards = set()
    for done, ref in enumerate(dump.refs, 1):
        if ref.shard not in bad_shards:
            try:
                findings += [Finding(ref.id, fault) for fault in _faults(ref, dump.read(ref))]
            except CorruptShardError as error:
                bad_shards.add(ref.shard)
                findings.append(Finding(ref.shard, str(error)))
            except (KeyError, ValueError) as error:
                findings.append(Finding(ref.id, f"it cannot be read ({error})"))
        progress(done)
    return findings


def _faults(ref: Ref, tensors: Tensors) -> list[str]:
    faults = []
    head = ref.header
    shape = (ref.tokens, len(head.boundaries), head.hidden_size)
    if tensors.aux.shape != shape:
        faults.append(f"aux has shape {tensors.aux.shape}, not {shape}")
    if head.final != "none" and (tensors.final is None or tensors.final.shape != (ref.tokens, head.hidden_size)):
        faults.append(f"final has shape {None if tensors.final is None else tensors.final.shape}, not {shape[::2]}")
    if tensors.input_ids.shape != (ref.tokens,):
        faults.append(f"it has {len(tensors.input_ids)} token ids for {ref.tokens} tokens")
    if not np.array_equal(tensors.positions, np.arange(ref.tokens)):
        faults.append("its positions are not 0, 1, 2, ...: a part is missing, twice there, or out of order")
    if sample_key(tensors.input_ids.tolist()) != ref.key:
        faults.append("its token ids are not those that the manifest lists")
    slots = [
        (f"boundary {boundary}", tensors.aux[:, i], _scale(tensors.aux_scale, i)) for i, boundary in enumerate(head.boundaries)
    ]
    if tensors.final is not None:
        slots.append(("final", tensors.final, tensors.final_scale))
    for name, stored, scale in slots if not faults else []:
        values = to_float32(stored, scale)
        if bad := int((~np.isfinite(values)).any(axis=1).sum()):
            faults.append(f"{bad} of {ref.tokens} rows of {name} are not finite")
        if zero := int((values == 0).all(axis=1).sum()):
            faults.append(f"{zero} of {ref.tokens} rows of {name} are all zero")
    return faults


def _scale(scale: Any, slot: int) -> Any:
    return None if scale is None else scale[:, slot]
