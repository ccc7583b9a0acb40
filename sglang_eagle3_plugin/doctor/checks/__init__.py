"""The checks, one module an idea, in the order in which their findings are best read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_eagle3_plugin.doctor.checks import (
    algorithm,
    context,
    convention,
    debugging,
    draft_class,
    dumps,
    head,
    hooks,
    known,
    layer_ids,
    norms,
    parallel,
    quantisation,
    reach,
    symptoms,
    tensors,
    vocabulary,
    widths,
)
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding

Check = Callable[[Deployment], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    tensors.check_files,
    hooks.check_target,
    algorithm.check,
    draft_class.check_name,
    hooks.check,
    layer_ids.check_place,
    layer_ids.check_range,
    layer_ids.check_reach,
    layer_ids.check_count,
    convention.check_graphs,
    convention.check_meaning,
    convention.check_engines,
    convention.check_no_aux,
    widths.check_fc,
    widths.check_sizes,
    draft_class.check_depth,
    head.check_head,
    head.check_embeddings,
    vocabulary.check,
    norms.check,
    norms.check_tensor_without_flag,
    tensors.check,
    quantisation.check,
    context.check,
    context.check_rope,
    parallel.check_tensor,
    parallel.check_pipeline,
    parallel.check_data,
    known.check,
    dumps.check,
    dumps.check_resume,
    symptoms.check,
    debugging.check,
    algorithm.check_tree,
    reach.check,
)
"""Every check, in order."""

CHEAP: tuple[Check, ...] = (
    hooks.check_target,
    algorithm.check,
    draft_class.check_name,
    hooks.check,
    layer_ids.check_range,
    layer_ids.check_reach,
    layer_ids.check_count,
    widths.check_fc,
    widths.check_sizes,
    head.check_head,
    parallel.check_tensor,
    parallel.check_pipeline,
)
"""Those that a server runs at its start: no reading of tables, no judgement of what is only likely."""

_WHATEVER_SERVES = {
    tensors.check_files,
    hooks.check_target,
    algorithm.check,
    algorithm.check_tree,
    dumps.check,
    dumps.check_resume,
    debugging.check,
    symptoms.check,
    reach.check,
}
"""Those that hold for a launch that isn't of EAGLE-3 too: the others presume what an EAGLE-3 draft is made of."""


def run(checks: tuple[Check, ...], d: Deployment) -> list[Finding]:
    """What the checks find in a deployment, in their order; those that presume EAGLE-3 only where that is served or meant."""
    return [finding for check in checks if d.eagle3 or check in _WHATEVER_SERVES for finding in check(d)]
