"""What a dump does to a target: has it emit boundaries, keeps what its logits processor is given, and takes all of it back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from sglang_eagle3_plugin.boundaries import check, default_boundaries
from sglang_eagle3_plugin.runtime import parallel
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
from sglang_eagle3_plugin.runtime.stacks import stack_of
from sglang_eagle3_plugin.runtime.target import SETTER, logits_processors
from sglang_eagle3_plugin.settings import DumpSettings

_FLAG = "capture_aux_hidden_states"
"""The attribute by which SGLang's targets hand their captures on; their setters turn it on and nothing turns it off."""
_FOLLOWED = "_eagle3_eager_prefill"
"""On a runner whose prefill graphs were refused when it was built, on every rank of the server."""


class DumpTarget:
    """A target that is dumped.

    Args:
        runner: its ``ModelRunner``.
        options: which boundaries.
        say: called with (key, sentence) about what is not as asked for.

    Raises:
        CaptureError, BoundaryError: it cannot give what is asked for.
    """

    def __init__(self, runner: Any, options: DumpSettings, say: Callable[[str, str], None]) -> None:
        self._model = runner.model
        self._options, self._say = options, say
        self._num_layers = int(runner.model_config.num_hidden_layers)
        self._speculating = not runner.spec_algorithm.is_none()
        self._flags = [(m, getattr(m, _FLAG)) for m in self._model.modules() if isinstance(vars(m).get(_FLAG), bool)]
        self._seen: dict[str, Any] = {}
        self._processors = logits_processors(self._model)
        if not self._processors:
            raise CaptureError(f"{type(self._model).__name__} has no LogitsProcessor, where the states would be seen")
        self._parameters = list(inspect.signature(self._processors[0].forward).parameters)
        self._alone = _ranks(runner) == 1
        self._graphs = refuse_prefill_graphs(runner, begun=True)
        self._last = self._stopped = False
        self._hooks: list[Any] = []
        try:
            self._boundaries: tuple[int, ...] = () if self._speculating else self._capture(runner)
        except Exception:
            self.release()
            raise
        self._hooks = self._hook()

    @property
    def known(self) -> tuple[int, ...]:
        """`boundaries` as far as they are known by now; from any thread."""
        return self._boundaries

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the captured slots, ascending; with a draft known from its target's first pass on.

        From 0.5.16 a target is wired to its draft only after its runner has been built.
        """
        if not self._boundaries:
            self._boundaries = stack_of(self._model, self._num_layers).captured
            asked = self._options.boundaries
            if asked and self._boundaries and asked != self._boundaries:
                having = f"a draft is served, so the dump has its boundaries {list(self._boundaries)}, not {list(asked)}"
                self._say("boundaries", having)
        return self._boundaries

    def take(self) -> dict[str, Any]:
        """What the logits processor was given in the last pass, by the names of its parameters; empty if no hook ran."""
        seen, self._seen = self._seen, {}
        if seen and seen["aux_hidden_states"] is None and not self._last and not self._stopped:
            # What adds the captures (runtime/delivery.py) may have come after us, with the draft: stand behind it from now on.
            self._last = True
            for hook in self._hooks:
                hook.remove()
            self._hooks = self._hook()
            if self._stopped:  # by another thread, just now: it saw the hooks before these
                self.stop()
        return seen

    def stop(self) -> None:
        """See nothing more; from any thread. The target goes on capturing, and prefill without graphs, until :meth:`release`."""
        self._stopped = True
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._seen = {}

    def release(self) -> None:
        """Have the target capture nothing more, unless a draft lives on it, and then let prefill graphs run again.

        Between passes only: it changes what a pass returns, and a graph that was captured without captures returns none. Where
        several ranks serve, prefill stays as it is: they must decide alike.
        """
        if not self._speculating:
            with contextlib.suppress(CaptureError):  # nothing captures where no stack was found
                stack_of(self._model, self._num_layers).capture(())
            for module, flag in self._flags:
                setattr(module, _FLAG, flag)
        if self._alone:
            for graphs, name in self._graphs:
                graphs.__dict__.pop(name, None)
            self._graphs = []

    def _hook(self) -> list[Any]:
        return [processor.register_forward_pre_hook(self._at_logits, with_kwargs=True) for processor in self._processors]

    def _capture(self, runner: Any) -> tuple[int, ...]:
        """Make the target emit the boundaries that are asked for."""
        asked = tuple(range(self._num_layers + 1)) if self._options.all_boundaries else self._options.boundaries
        wanted = check(asked or default_boundaries(self._num_layers), self._num_layers)
        if not hasattr(self._model, SETTER):
            # As for a draft: delegated, or the generic tap.
            from sglang_eagle3_plugin import activation
            from sglang_eagle3_plugin.patches import completion

            completion.complete(runner, activation.apply)
        setter = getattr(self._model, SETTER, None)
        if setter is None:
            raise CaptureError(f"{type(self._model).__name__} has no {SETTER}, so it captures nothing")
        setter(None)  # makes the model hand its captures on; which ones is the stack's business
        stack = stack_of(self._model, self._num_layers)
        stack.capture(wanted)
        if not self._alone:
            fused = getattr(runner.server_args, "enable_flashinfer_allreduce_fusion", False)
            if fused or isinstance(stack, LayerTap):
                what = "enable_flashinfer_allreduce_fusion" if fused else "the generic tap"
                raise CaptureError(f"one rank dumps, and with {what} its capture would wait for sums that the others do not take")
        parallel.check(runner, stack)
        return wanted

    def _at_logits(self, processor: Any, args: Any, kwargs: Any = None) -> None:
        if kwargs is None:  # removed by another thread while torch was about to call it, which then forgets the keywords
            return
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        self._seen = {name: given.get(name) for name in ("input_ids", "hidden_states", "aux_hidden_states")}


def refuse_prefill_graphs(runner: Any, *, begun: bool) -> list[tuple[Any, str]]:
    """Have prefill run eagerly, for inside a replayed graph no hook fires; returns what to take back, (object, attribute).

    Args:
        runner: a ``ModelRunner``; where several ranks serve, each must do so or none.
        begun: on the rank that dumps; elsewhere nothing is refused here, only followed.

    Raises:
        CaptureError: its graphs exist already and other ranks have theirs: they must decide alike.
    """
    # SGLang names the runner of prefill graphs by release: piecewise to 0.5.13.post1, then prefill.
    found = [getattr(runner, name, None) for name in ("piecewise_cuda_graph_runner", "prefill_cuda_graph_runner")]
    found = [graphs for graphs in found if graphs is not None and type(graphs).__name__ != "EagerRunner"]
    if not found:
        # From 0.5.14 they are captured after the runner has been built, as these settings say then.
        parallel.turn_off_prefill_graphs(runner.server_args, parallel.PREFILL_GRAPHS, "a dump sees eager passes alone")
        return []
    if begun and _ranks(runner) > 1 and not getattr(runner, _FOLLOWED, False):
        raise CaptureError(
            "prefill graphs run on every rank, and one rank dumps; start the server with EAGLE3_DUMP_DIR, or without them"
        )
    setattr(runner, _FOLLOWED, True)
    refused = []
    for graphs in found:
        for ask in ("can_run", "can_run_graph"):
            if hasattr(graphs, ask):
                setattr(graphs, ask, lambda *_args, **_kwargs: False)
                refused.append((graphs, ask))
    return refused


def _ranks(runner: Any) -> int:
    arguments = runner.server_args
    return int(getattr(arguments, "tp_size", 1)) * int(getattr(arguments, "dp_size", 1))
