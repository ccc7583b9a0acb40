"""The checks that a server runs on itself at its start, before a weight is read. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_eagle3_plugin.checkpoints import Checkpoint
from sglang_eagle3_plugin.doctor.checks import CHEAP, run
from sglang_eagle3_plugin.doctor.deployment import Deployment, Model
from sglang_eagle3_plugin.doctor.findings import Finding, ordered
from sglang_eagle3_plugin.doctor.flags import Flags

_FLAGS = {
    "speculative_algorithm": "--speculative-algorithm",
    "speculative_draft_model_path": "--speculative-draft-model-path",
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
    "dp_size": "--dp-size",
}
_PATHS = {
    "model_path": "--model-path",
    "revision": "--revision",
    "speculative_draft_model_revision": "--speculative-draft-model-revision",
}
_SWITCHES = {
    "enable_dp_attention": "--enable-dp-attention",
    "enable_flashinfer_allreduce_fusion": "--enable-flashinfer-allreduce-fusion",
    "enforce_disable_flashinfer_allreduce_fusion": "--enforce-disable-flashinfer-allreduce-fusion",
    "disable_cuda_graph": "--disable-cuda-graph",
}


def certain_faults(
    target_config: Mapping[str, Any],
    draft_config: Mapping[str, Any],
    draft_header: Checkpoint | None,
    server_args: Any,
    release: str,
    *,
    plugin: bool = True,
    draft_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Find what is certain to go wrong with a launch.

    Args:
        target_config: the target's config.json.
        draft_config: the draft's.
        draft_header: the draft's tensors (:func:`checkpoints.read_checkpoint`), None where they are not at hand.
        server_args: SGLang's ``ServerArgs``, or anything with the attributes of it that matter; missing ones count as not given.
        release: of SGLang.
        plugin: whether the plugin is active, which mends what then is no fault: missing hooks, other boundaries.
        draft_path: the draft's directory, which may tell its name and hold a manifest.
        environ: where ``EAGLE3_*`` is read; empty unless given.

    Returns:
        Errors alone, and of those the certain ones; none for a draft of EAGLE-1 or 2, or a model's own MTP layers, served as such.
    """
    deployment = Deployment(
        target=Model(target_config, "target config.json"),
        draft=Model(draft_config, "draft config.json", draft_header, draft_path),
        flags=flags_of(server_args),
        release=release,
        plugin=plugin,
        environ=environ or {},
    )
    return [finding for finding in ordered(run(CHEAP, deployment)) if finding.severity == "error" and finding.sure == "certain"]


def arguments_of(flags: Flags) -> SimpleNamespace:
    """Write flags as the attributes of a ``ServerArgs`` that they will become; :func:`flags_of` backwards."""
    texts = {attribute: flags.text(flag) for attribute, flag in (_FLAGS | _PATHS).items()}
    return SimpleNamespace(**texts, **{attribute: flags.has(flag) for attribute, flag in _SWITCHES.items()})


def flags_of(server_args: Any) -> Flags:
    """Read a ``ServerArgs`` as the flags that it came from."""
    given: dict[str, tuple[str, ...]] = {}
    for attribute, flag in _FLAGS.items():
        value = getattr(server_args, attribute, None)
        if value is not None:
            given[flag] = (str(value),)
    given.update({flag: () for attribute, flag in _SWITCHES.items() if getattr(server_args, attribute, False) is True})
    return Flags(given)
