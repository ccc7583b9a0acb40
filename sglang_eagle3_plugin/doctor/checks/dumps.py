"""Collecting hidden states: from which server, how much it takes, whether what is there is whole and labelled right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_OVER_THE_API = "--enable-return-hidden-states"
_AUX_FLAG = "--enable-return-aux-hidden-states"
_BYTES = 2
_LARGE = 1 << 40


def check(d: Deployment) -> Iterator[Finding]:
    """Find what makes collected states slow, short or mixed up, before they are collected."""
    if not d.collecting:
        return
    if d.flags.algorithm:
        yield Finding(
            "ERR_DUMP_UNDER_SPECULATION",
            "Hidden states are to be collected from a server that speculates: fewer states than tokens come back, silently, and "
            "those of "
            "different requests may be mixed.",
            (d.of_flag("--speculative-algorithm"), d.of_flag(_OVER_THE_API)),
            "Collect from the target alone, without --speculative-algorithm.",
            ("FIXABLE_BY_FLAG",),
        )
    if not d.environ.get("EAGLE3_DUMP_DIR"):
        yield Finding(
            "DUMP_FAST_PATH",
            "States returned over the API are turned into JSON lists: up to 17 times slower end to end.",
            (d.of_flag(_OVER_THE_API),),
            "Set EAGLE3_DUMP_DIR with sglang-eagle3-plugin: it writes safetensors from the scheduler, asynchronously.",
            ("FIXABLE_BY_PLUGIN",),
        )
    if d.flags.has(_OVER_THE_API) and not d.flags.has("--disable-radix-cache"):
        yield Finding(
            "WARN_DUMP_PREFIX_CACHE",
            "Cached prefixes are not computed again, so their states are missing from what is returned.",
            (d.of_flag("--disable-radix-cache"),),
            "Add --disable-radix-cache.",
            ("FIXABLE_BY_FLAG",),
        )
    stock = facts.since(d.release, facts.RETURN_AUX_FROM)
    if facts.known(d.release):
        yield Finding(
            "DUMP_AVAILABLE_FROM_0.5.2x",
            f"Stock SGLang returns chosen layers from {facts.RETURN_AUX_FROM} on ({_AUX_FLAG} with "
            f"--return-aux-hidden-state-layer-ids: no "
            "draft, pp 1, ids read as in the setter)" + ("." if stock else f", not in {d.release}: use the plugin's dump there."),
            (d.of_release(),),
            "" if stock else "Set EAGLE3_DUMP_DIR with sglang-eagle3-plugin; the format is the same on every release.",
            () if stock else ("FIXABLE_BY_PLUGIN",),
        )
    if d.flags.has(_AUX_FLAG) and facts.known(d.release) and not stock:
        yield Finding(
            "ERR_FLAG_UNKNOWN",
            f"SGLang {d.release} has no {_AUX_FLAG}; it comes with {facts.RETURN_AUX_FROM}.",
            (d.of_flag(_AUX_FLAG), d.of_release()),
            "Set EAGLE3_DUMP_DIR with sglang-eagle3-plugin instead.",
        )
    yield from _budget(d)


def _budget(d: Deployment) -> Iterator[Finding]:
    w, hidden = d.wiring, d.target.hidden_size if d.target else None
    if not d.collect_tokens or not hidden:
        return
    states = (len(w.decision.boundaries) if w.decision and w.decision.boundaries else 3) + 1
    needed = d.collect_tokens * states * hidden * _BYTES
    free = _free(d.states or Path(d.environ.get("EAGLE3_DUMP_DIR") or "."))
    if needed > _LARGE or (free is not None and needed > free):
        yield Finding(
            "WARN_DISK_BUDGET",
            f"{d.collect_tokens} tokens x {states} states x {hidden} x {_BYTES} bytes are {needed / 1e9:.0f} GB"
            + (f", and {free / 1e9:.0f} GB are free." if free is not None else "."),
            (Evidence("plan", "tokens", str(d.collect_tokens)),),
            "Collect fewer or shorter samples, or feed the trainer while collecting and delete what it has read.",
        )


def _free(directory: Path) -> int | None:
    for place in (directory, *directory.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def check_resume(d: Deployment) -> Iterator[Finding]:
    """Note what becomes of a collection that was interrupted."""
    there = d.states is not None and d.states.is_dir()
    if not d.collecting and not there:
        return
    shards = len(list(d.states.glob("*.safetensors"))) if d.states is not None and there else 0
    yield Finding(
        "DUMP_RESUME",
        (f"{d.states} holds {shards} shards. " if there else "")
        + "An interrupted collection goes on where it stopped: what the manifest lists is not asked for again, an unfinished "
        "shard is not "
        "listed.",
        (Evidence(str(d.states), "shards", str(shards)),) if there else (),
        "sglang-eagle3 hidden-states verify checks what is there." if there else "",
    )
