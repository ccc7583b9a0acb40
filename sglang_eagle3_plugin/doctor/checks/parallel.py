"""Tensor, pipeline and data parallelism: what of the captured states survives them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.boundaries import default_boundaries
from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding

_FUSION = "--enable-flashinfer-allreduce-fusion"
_NO_FUSION = ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-flashinfer-allreduce-fusion")


def check_tensor(d: Deployment) -> Iterator[Finding]:
    """Find captures taken before a fused all-reduce has summed them: each rank keeps its own partial sum."""
    name = d.target.architecture if d.target else None
    if d.flags.tp <= 1 or not d.eagle3 or any(map(d.flags.has, _NO_FUSION)):
        return
    state = facts.partial_sums(d.release, name)
    if state is None:
        return
    family, fixed = state
    asked = d.flags.has(_FUSION)
    itself = facts.fuses_by_itself(d.release, name)
    if not asked and (not itself or d.flags.has("--enable-dp-attention")):
        return
    yield Finding(
        "ERR_TP_PARTIAL_CAPTURE" if asked else "WARN_TP_PARTIAL_CAPTURE",
        f"With tensor parallelism {d.flags.tp} and the fused all-reduce"
        + ("" if asked else f", which SGLang {d.release} turns on by itself for {name} on Hopper and Blackwell,")
        + f" {family} captures the stream before it is summed: each rank stores a partial sum. Shapes are right, acceptance is "
        f"worse.",
        (d.of_flag("--tp-size"), d.of_flag(_FUSION), d.of_release()),
        ("Leave out " + _FUSION + ". " if asked else "")
        + (f"Add {_NO_FUSION[0]}" if facts.since(d.release, facts.FORCED_OFF_FROM) else "Turn the fusion off")
        + (f", or use SGLang {fixed} or newer." if fixed else "."),
        ("FIXABLE_BY_FLAG", *((f"OK_FROM_{fixed}",) if fixed else ())),
        "certain" if asked else "likely",
    )


def check_pipeline(d: Deployment) -> Iterator[Finding]:
    """Find captures on pipeline stages other than the last, which never reach the draft."""
    stages = d.flags.pp
    if stages <= 1 or not d.eagle3 or not d.wiring.aux:
        return
    depth = d.target.num_layers if d.target else None
    w = d.wiring
    wanted = (w.captures.eager if w.captures else None) or (w.decision.boundaries if w.decision else None)
    wanted = wanted or (default_boundaries(depth) if depth else None)
    placed = ""
    if depth and wanted:
        first = depth - depth // stages
        lost = [b for b in wanted if b < first]
        by_stage = ", ".join(f"{b} on stage {min(b * stages // depth, stages - 1)}" for b in wanted)
        placed = f" Of the boundaries {list(wanted)} ({by_stage}), {len(wanted) - len(lost)} reach the last of {stages} stages."
    yield Finding(
        "ERR_PP_CAPTURE_LOST",
        "With pipeline parallelism the states captured on earlier stages are dropped (the setter returns early there), and the "
        "embeddings "
        f"that the draft shares lie on the first stage, the draft on the last.{placed} It fails on a width, or in "
        f"get_embed_and_head.",
        (d.of_flag("--pp-size"), *((d.target.says("num_hidden_layers"),) if d.target else ())),
        "Use --pp-size 1; spread the target by --tp-size instead.",
        ("FIXABLE_BY_FLAG",),
    )


def check_data(d: Deployment) -> Iterator[Finding]:
    """Warn of data-parallel attention with EAGLE-3, which some releases and targets serve badly."""
    if d.flags.has("--enable-dp-attention") and d.eagle3:
        yield Finding(
            "WARN_DP_ATTENTION",
            "Data-parallel attention with EAGLE-3: acceptance length 2.35 fell to 1.48 where this was reported (0.5.7, sglang "
            "issue 16274), "
            "and only some targets are known to be right with it.",
            (d.of_flag("--enable-dp-attention"), d.of_flag("--dp-size"), d.of_release()),
            "Compare spec_accept_length with and without --enable-dp-attention before you rely on it.",
            ("FIXABLE_BY_FLAG",),
            "likely",
        )
