"""``EAGLE3_DUMP_DIR``: the hidden states of every request, from a live server to disk.

The auxiliary states and the final one meet in one place of every release, the call of ``LogitsProcessor``; a hook there keeps
references, the tap after the pass knows whose rows they are, and the scheduler's result says which requests are complete and which
were aborted. SGLang's own capture modes stay as they are. Prefill passes run eagerly while a dump is on: inside a replayed prefill
graph no hook fires. Generated tokens are dumped on request where decoding is eager too, and never from a speculating server, whose
verify passes hold candidates (SGLang issue 26163).
"""

from __future__ import annotations

import collections
import hashlib
import logging
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import __version__
from sglang_eagle3_plugin.hidden_states.layout import Header
from sglang_eagle3_plugin.loaded import sglang_release
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.dump_target import DumpTarget, refuse_prefill_graphs
from sglang_eagle3_plugin.runtime.spool import Block, Finished, Spool
from sglang_eagle3_plugin.settings import DumpSettings, Settings

logger = logging.getLogger("sglang_eagle3_plugin")

current: Dump | None = None
"""The dump of this process, or None. `patches/dump_requests.py` tests this one attribute."""

_REMEMBERED = 1 << 16
"""Requests whose sample is out but which go on decoding: so many are known at a time."""


def start(runner: Any, settings: Settings) -> None:
    """Begin to dump a target, if the user asked for it, on the one rank that writes, and make it switchable; a starter of `tap`.

    Raises:
        CaptureError, BoundaryError: the target cannot give what is asked for. The tap logs it; serving goes on.
    """
    if runner.is_draft_worker or current is not None:
        return
    if settings.dump_dir is not None and runner.server_args.pp_size == 1:
        refuse_prefill_graphs(runner, begun=False)  # on every rank, for they must decide alike
    if not _writes(runner, settings):
        return
    from sglang_eagle3_plugin.runtime.dump_switch import begin_switch

    switch = begin_switch(runner, settings)
    if settings.dump_dir is not None:
        try:
            begin(runner, Path(settings.dump_dir), settings.dump)
        except Exception as error:
            switch.not_begun(error)
            raise


def begin(runner: Any, directory: Path, options: DumpSettings) -> Dump:
    """Begin to dump; on the thread that runs the passes, between two of them.

    Raises:
        CaptureError, BoundaryError: see :func:`start`.
    """
    global current
    current = Dump(runner, directory, options)
    tap.add(current)
    return current


def batch_done(batch: Any) -> None:
    """The scheduler has processed a batch's result; never raises."""
    dump = current
    if dump is None or not dump.enabled:
        return
    try:
        dump.on_batch_done(batch.reqs)
    except Exception as error:
        dump.fail(error)


@dataclass
class _Pending:
    parts: list[tuple[Block, int, int]] = field(default_factory=list)
    rows: int = 0
    refused: str = ""


class Dump:
    """Rows by request, until the request is complete. A consumer of `tap`; one per process.

    Attributes:
        enabled: whether it still dumps; what has ended stays so.
        target: what it does to the target.

    Raises:
        CaptureError, BoundaryError: see :func:`start`.
    """

    def __init__(self, runner: Any, directory: Path, options: DumpSettings) -> None:
        self.enabled = True
        self.runner = runner
        self.options = options
        self._said: set[str] = set()
        self.target = DumpTarget(runner, options, self._say)
        self._fault = ""
        self._config = _config_checksum(runner.server_args.model_path)
        self._pending: collections.OrderedDict[str, _Pending] = collections.OrderedDict()
        self._done: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._lock = threading.Lock()
        limits = {"max_bytes": options.max_bytes, "min_free_bytes": options.min_free_bytes}
        try:
            self.spool = Spool(directory, self._header, limits, options.queue_bytes, self._off)
        except BaseException:  # no thread to be had: nobody would ever give the target back
            self.target.stop()
            self.target.release()
            raise

    @property
    def problem(self) -> str:
        """Why it has ended by itself, or an empty string."""
        return self.spool.problem or self._fault

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Of the slots of ``aux``, ascending; see `DumpTarget.boundaries`."""
        return self.target.boundaries

    def _header(self, aux_shape: tuple[int, ...], dtype: str) -> Header:
        return Header(
            boundaries=self.boundaries,
            hidden_size=aux_shape[-1],
            dtype=dtype,
            final="post_norm" if self.options.final else "none",
            num_layers=int(self.runner.model_config.num_hidden_layers),
            model=str(self.runner.server_args.model_path),
            architecture=type(self.runner.model).__name__,
            config_sha256=self._config,
            sglang=sglang_release(),
            plugin=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    # Rows of a pass

    def on_forward(self, runner: Any, forward_batch: Any, output: Any) -> None:
        """See `tap.Consumer`. A fault ends all of the dump, where the tap alone would only show it no more passes."""
        try:
            self._look(runner, forward_batch, output)
        except Exception as error:
            self.fail(error)

    def _look(self, runner: Any, forward_batch: Any, output: Any) -> None:
        if runner is not self.runner:
            return
        seen = self.target.take()
        if not self.enabled:
            return
        mode = forward_batch.forward_mode.name
        if mode == "DECODE":
            if self.options.generated:
                self._decoded(forward_batch, seen, output)
        elif mode in ("EXTEND", "MIXED"):
            lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
            prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
            with self._lock:
                self._rows(tap.request_ids(forward_batch) or [], lengths, prefixes, seen)

    def _decoded(self, forward_batch: Any, seen: dict[str, Any], output: Any) -> None:
        rids = tap.request_ids(forward_batch) or []
        with self._lock:
            if output.can_run_graph or not seen:
                self._say(
                    "generated",
                    "generated tokens are not dumped while decoding runs in CUDA graphs; start with --disable-cuda-graph",
                )
                for rid in rids:
                    self._refuse(rid, "generated_in_graph")
                return
            rows = [self._pending[rid].rows if rid in self._pending else -1 for rid in rids]
            self._rows(rids, [1] * len(rids), rows, seen)

    def _rows(self, rids: list[str], lengths: list[int], prefixes: list[int], seen: dict[str, Any]) -> None:
        wanted = []
        start = 0
        for rid, length, prefix in zip(rids, lengths, prefixes, strict=False):
            if rid not in self._done and not rid.startswith("HEALTH_CHECK") and prefix >= 0:
                wanted.append((rid, start, start + length, prefix))
            start += length
        if not wanted:
            return
        tensors = self._tensors(seen, start)
        keep = [item for item in wanted if self._continues(*item)]
        if not keep:
            return
        if isinstance(tensors, str):
            for rid, *_ in keep:
                self._refuse(rid, tensors)
            return
        block = self.spool.copy(tensors, self.options.wait)
        while block is None and not self.spool.busy and self._evict({rid for rid, *_ in keep}):
            block = self.spool.copy(tensors, self.options.wait)
        for rid, first, last, _ in keep:
            if block is None:
                self._say(
                    "lagging",
                    "the disk is slower than the server: samples are dropped (EAGLE3_DUMP_WHEN_FULL=wait slows the server)",
                )
                self._refuse(rid, "lagging")
            else:
                pending = self._pending.get(rid)
                if pending is not None:  # else the dump was turned off meanwhile, by another thread
                    pending.parts.append((block, first, last))
                    pending.rows += last - first

    def _continues(self, rid: str, start: int, end: int, prefix: int) -> bool:
        """Whether these rows follow on what is there; a first part that does not begin at 0 was served from the prefix cache."""
        pending = self._pending.setdefault(rid, _Pending())
        if pending.refused:
            return False
        if prefix == pending.rows:
            return True
        if prefix == 0:  # retracted, and run again from the start
            self.spool.counts["retracted"] += 1
            self._pending[rid] = _Pending()
            return True
        if pending.rows == 0:
            self._say(
                "cached", "a cached prefix has no states to dump, such requests are refused; start with --disable-radix-cache"
            )
        self._refuse(rid, "cached_prefix" if pending.rows == 0 else "out_of_order")
        return False

    def _tensors(self, seen: dict[str, Any], rows: int) -> dict[str, Any] | str:
        """The pass's tensors, cut to its real rows, or the reason why there are none."""
        import torch

        final, aux = seen.get("hidden_states"), seen.get("aux_hidden_states")
        if final is None or aux is None:
            self._say("unseen", "a prefill pass showed no captured states (a prefill graph?); its requests are not dumped")
            return "unseen"
        if isinstance(aux, (list, tuple)):
            slots = len(aux)
            stacked = torch.stack(list(aux), dim=1) if slots else None
        else:
            slots = aux.shape[-1] // final.shape[-1]
            stacked = aux.unflatten(-1, (slots, final.shape[-1]))
        if stacked is None or slots != len(self.boundaries):
            self._say("slots", f"the target captured {slots} states where boundaries {list(self.boundaries)} are due")
            return "wrong_slots"
        if min(len(final), len(stacked), len(seen["input_ids"])) < rows:
            self._say("sharded", "a pass has fewer rows than tokens (states are sharded over ranks); its requests are not dumped")
            return "sharded"
        tensors = {"input_ids": seen["input_ids"][:rows].to(torch.int64), **self._stored("aux", stacked[:rows])}
        return tensors | (self._stored("final", final[:rows]) if self.options.final else {})

    def _stored(self, name: str, states: Any) -> dict[str, Any]:
        if not self.options.fp8:
            return {name: states.contiguous()}
        import torch

        # 448 is the largest float8 e4m3fn; one scale a row and slot, since a few channels of the stream are huge.
        scale = states.abs().amax(dim=-1).float().clamp(min=1e-12) / 448.0
        return {name: (states.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    # Requests

    def on_batch_done(self, requests: Any) -> None:
        """After the scheduler processed a batch: complete samples go out, aborted ones are dropped."""
        with self._lock:
            for request in requests:
                rid = str(request.rid)
                finished = bool(request.finished())
                pending = self._pending.get(rid)
                if pending is not None:
                    self._settle(rid, request, pending, finished)
                if finished:
                    self._done.pop(rid, None)

    def _settle(self, rid: str, request: Any, pending: _Pending, finished: bool) -> None:
        prompt = len(request.origin_input_ids)
        ids = [*request.origin_input_ids, *(request.output_ids if self.options.generated else ())]
        if finished and "ABORT" in type(request.finished_reason).__name__:
            self._close(rid, "aborted")
        elif pending.refused:
            if finished:
                self._close(rid, pending.refused)
        elif self.options.generated:
            # The last token was sampled and never run: it has no states.
            if finished:
                self._out(rid, ids[:-1] if len(ids) > prompt else ids, pending, prompt)
        elif pending.rows >= prompt:
            self._out(rid, ids, pending, prompt)

    def _out(self, rid: str, ids: list[int], pending: _Pending, prompt: int) -> None:
        if pending.rows < len(ids):
            self._close(rid, "incomplete")
            return
        # An overlapped decode pass may have run one token beyond the end.
        parts, surplus = list(pending.parts), pending.rows - len(ids)
        while surplus:
            block, first, last = parts.pop()
            cut = min(surplus, last - first)
            surplus -= cut
            if last - cut > first:
                parts.append((block, first, last - cut))
        self.spool.submit(Finished(ids, parts, rid, prompt))
        self._close(rid, "")

    def _close(self, rid: str, reason: str) -> None:
        self._pending.pop(rid, None)
        self._done[rid] = None
        while len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)
        if reason:
            self.spool.counts[reason] += 1

    def _refuse(self, rid: str, reason: str) -> None:
        pending = self._pending.setdefault(rid, _Pending())
        pending.parts, pending.refused = [], pending.refused or reason

    def _evict(self, spare: set[str]) -> bool:
        """Drop the oldest request that holds rows: one that never came back, or too many at once for the queue."""
        for rid, pending in list(self._pending.items()):
            if pending.parts and rid not in spare:
                self._refuse(rid, "evicted")
                return True
        return False

    # Ends

    def ignore(self, rids: Iterable[str]) -> None:
        """Dump none of these requests: they began before the dump did."""
        self._done.update(dict.fromkeys(rids))

    def end(self) -> None:
        """Write what is complete, and let go of the directory; not on the serving thread, for it waits for the disk."""
        self._off()
        self.spool.stop()

    def fail(self, error: Exception) -> None:
        """Turn the dump off after a fault of its own; serving goes on."""
        self._fault = f"the dump to {self.spool.directory} has ended: {type(error).__name__}: {error}"
        self.spool.counts["faults"] += 1
        self._off()
        tap.failed("dump", error)

    def _off(self) -> None:
        self.enabled = False
        tap.remove(self)
        self.target.stop()
        self._pending.clear()
        # However it ends, the target is given back between two passes.
        tap.add(tap.AfterPass(self.runner, lambda _: self.target.release() if current in (None, self) else None))

    def _say(self, key: str, sentence: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("sglang-eagle3-plugin: %s.", sentence)


def _writes(runner: Any, settings: Settings) -> bool:
    """Whether this rank has whole rows that no other rank writes: the first of its attention group, and the only pipeline stage."""
    if runner.server_args.pp_size > 1:
        if settings.dump_dir is not None:
            logger.warning("sglang-eagle3-plugin: no dump with pipeline parallelism, which drops early captures.")
        return False
    return _attention_rank() == 0


def _attention_rank() -> int:
    """Rank within the attention TP group: in the runtime context where there is one (0.5.18 has), before in `dp_attention`."""
    context = sys.modules.get("sglang.srt.runtime_context")
    if context is not None and hasattr(context, "get_parallel"):
        return int(context.get_parallel().attn_tp_rank)
    return int(sys.modules["sglang.srt.layers.dp_attention"].get_attention_tp_rank())


def _config_checksum(model_path: str) -> str:
    try:
        return hashlib.sha256(Path(model_path, "config.json").read_bytes()).hexdigest()
    except OSError:
        return ""
