"""Run the unmodified engine of an SGLang release without a GPU: once for a few prompts, or as a server.

SGLang's Triton kernels run in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``); what exists as CUDA code only is replaced
(``site/eagle3_rig/replacements.py`` lists it). An engine whose scheduler dies kills its caller too, so each has a process group of
its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from packaging.specifiers import SpecifierSet

from sglang_eagle3_plugin.rig import models, process
from sglang_eagle3_plugin.rig.environments import Environment

SITE = Path(__file__).parent / "site"
WORKER = Path(__file__).parent / "worker.py"

PROMPTS = ((17, 34, 51, 68, 85), (200, 3, 77))

ENGINE_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "log_level": "info",
}

CUDA_ARGUMENTS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float16",  # SGLang's CUDA norms take no float32, and labels of a bfloat16 are too coarse for the drafts' exact sums
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "enable_multimodal": False,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "context_length": 4096,
    "chunked_prefill_size": 2048,  # fewer sizes of prefill graphs to capture
    "log_level": "info",
}
"""On a machine with a GPU: what `tests/gpu` and `benchmarks/h200.py` serve with; no kernels but SGLang's own and Triton's."""

# (releases, arguments, why)
ARGUMENTS_BY_RELEASE: tuple[tuple[SpecifierSet, dict[str, Any], str], ...] = (
    (
        SpecifierSet(">=0.5.10,<0.5.14", prereleases=True),
        {"disable_piecewise_cuda_graph": True},
        "it asks torch.cpu for a graph pool, which it hasn't got",
    ),
)

ENVIRONMENT = {
    "EAGLE3_RIG": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # a GPU that happens to be here stays out of it
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def speculative(
    draft: Path, num_steps: int = 3, topk: int = 1, num_draft_tokens: int | None = None, algorithm: str = "EAGLE3"
) -> dict[str, Any]:
    """The arguments of an engine that serve a draft; see :class:`EngineSpec` for each."""
    nodes = num_steps + 1 if topk == 1 else 2 * num_steps + 2
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": num_draft_tokens or nodes,
    }


@dataclass(frozen=True)
class EngineSpec:
    """One run.

    Attributes:
        target: directory of the target.
        draft: directory of the draft; None for plain decoding.
        prompts: token ids, one tuple a prompt.
        max_new_tokens: tokens a prompt.
        num_steps: draft steps.
        topk: beams a step.
        num_draft_tokens: nodes a tree, the root included; None: num_steps + 1 for a chain, else 2 * num_steps + 2.
        algorithm: ``EAGLE3``, or another that is to be shown failing.
        arguments: further arguments of `sglang.Engine` or, as flags, of `sglang.launch_server`.
        environment: further variables, such as ``EAGLE3_PLUGIN=0``.
        return_hidden_states: ask for them with the outputs.
        images: a file a prompt, which its ids name a place for (``pictures.IMAGE``); the target needs processor files then.
        rewired_ids: run the prompts a second time after the target's setter was called with these ids; for labelled families only.
            Outputs of the second time follow those of the first.
        timeout_s: after this the run is killed and counts as failed.
    """

    target: Path
    draft: Path | None = None
    prompts: tuple[tuple[int, ...], ...] = PROMPTS
    max_new_tokens: int = 8
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    algorithm: str = "EAGLE3"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    return_hidden_states: bool = False
    images: tuple[Path, ...] = ()
    rewired_ids: tuple[int, ...] | None = None
    timeout_s: float = 400

    def stock(self) -> EngineSpec:
        """The same run with the plugin off."""
        return replace(self, environment={**self.environment, "EAGLE3_PLUGIN": "0"})

    def engine_arguments(self, release: str) -> dict[str, Any]:
        """All arguments of the engine for a release."""
        arguments = {"model_path": str(self.target), **ENGINE_ARGUMENTS, "enable_multimodal": bool(self.images)}
        for releases, extra, _ in ARGUMENTS_BY_RELEASE:
            if release in releases:
                arguments |= extra
        if self.draft is not None:
            arguments |= speculative(self.draft, self.num_steps, self.topk, self.num_draft_tokens, self.algorithm)
        return arguments | dict(self.arguments)


@dataclass(frozen=True)
class EngineResult:
    """What came of a run.

    Attributes:
        ok: the engine answered.
        tokens: new token ids, one tuple a prompt.
        meta_info: SGLang's, one a prompt.
        observed: what reached the draft: ``{"mode", "width", "boundaries"}``, each distinct sight once.
        records: the plugin's records of the processes (see ``records.py``), read while they lived; empty where it is off.
        error: the last exception's line when it failed, else None.
        seconds: the whole run.
        log: all that the processes printed.
        outputs: SGLang's outputs as they came.
    """

    ok: bool
    tokens: tuple[tuple[int, ...], ...]
    meta_info: tuple[dict[str, Any], ...]
    observed: tuple[dict[str, Any], ...]
    records: tuple[dict[str, Any], ...]
    error: str | None
    seconds: float
    log: str
    outputs: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def spec_accept_length(self) -> float | None:
        """The acceptance length over all prompts: new tokens a verification; None without a draft.

        From the counts of ``meta_info``, as SGLang's own ``spec_accept_length`` of each prompt. The first token comes without a
        verification, so n tokens of a draft that is never right make n / (n - 1).
        """
        verified = sum(meta.get("spec_verify_ct", 0) for meta in self.meta_info)
        return sum(meta["completion_tokens"] for meta in self.meta_info) / verified if verified else None

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """The boundaries that reached the draft, the same in every forward mode; None when nothing did, or they differ."""
        distinct = {tuple(sight["boundaries"]) for sight in self.observed}
        return distinct.pop() if len(distinct) == 1 else None

    @cached_property
    def patch_states(self) -> dict[str, str]:
        """Patch id -> state in the scheduler, or wherever the patch's module was imported; an applied one wins."""
        states: dict[str, str] = {}
        for record in self.records:
            for row in record["patches"]:
                if states.get(row["patch"]) != "applied":
                    states[row["patch"]] = row["state"]
        return states


def run(environment: Environment, spec: EngineSpec) -> EngineResult:
    """Run one engine for the spec's prompts. A failure of the engine is a result, not an exception."""
    with _workplace(spec) as place:
        request = {
            "engine": spec.engine_arguments(environment.release),
            "prompts": spec.prompts,
            "sampling_params": {"max_new_tokens": spec.max_new_tokens, "temperature": 0.0, "ignore_eos": True},
            "return_hidden_states": spec.return_hidden_states,
            "images": [str(path) for path in spec.images],
            "rewired_ids": spec.rewired_ids,
            "records": str(place.records),
        }
        (place.root / "request.json").write_text(json.dumps(request), encoding="utf-8")
        result = place.root / "result.json"
        argv = [str(environment.python), str(WORKER), str(place.root / "request.json"), str(result)]
        started = time.monotonic()
        timed_out = False
        with process.supervised(argv, place.variables, place.log) as child:
            while child.poll() is None and not result.exists():
                timed_out = time.monotonic() - started > spec.timeout_s
                if timed_out:
                    break
                time.sleep(0.1)
            seconds = time.monotonic() - started
        log = place.log.read_text(encoding="utf-8", errors="replace")
        answer = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"outputs": [], "records": []}
        outputs = tuple(answer["outputs"])
        error = f"no answer within {spec.timeout_s:g} s" if timed_out else last_error(log)
        return EngineResult(
            ok=bool(outputs),
            tokens=tuple(tuple(output["output_ids"]) for output in outputs),
            meta_info=tuple(output["meta_info"] for output in outputs),
            observed=place.observed(),
            records=tuple(answer["records"]),
            error=None if outputs else error,
            seconds=seconds,
            log=log,
            outputs=outputs,
        )


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: its base URL.
        pid: the launcher's process.
        place: its working directory, log and records.
        process: the launcher's process.
    """

    url: str
    pid: int
    place: Workplace
    process: subprocess.Popen[Any]

    def generate(self, prompts: tuple[tuple[int, ...], ...] = PROMPTS, max_new_tokens: int = 8) -> list[dict[str, Any]]:
        """POST /generate; SGLang's outputs, one a prompt.

        Raises:
            httpx.HTTPError: the server answers with an error, or not at all.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/generate", json={"input_ids": prompts, "sampling_params": sampling}, timeout=300)
        answer.raise_for_status()
        outputs: list[dict[str, Any]] = answer.json()
        return outputs


class ServerDiedError(RuntimeError):
    """The server ended, or was not ready in time; the message is its last exception's line."""


@contextlib.contextmanager
def launch(environment: Environment, spec: EngineSpec, before: Sequence[str] = ()) -> Iterator[Server]:
    """Start ``python -m sglang.launch_server``, not waiting until it is ready; it is ended with the block.

    Args:
        environment: of the release.
        spec: target, draft, arguments.
        before: what the command is given to, a shell's ``sh -c '...; exec "$@"' -`` say.
    """
    with _workplace(spec) as place:
        port = process.free_port()
        arguments = spec.engine_arguments(environment.release) | {"host": "127.0.0.1", "port": port}
        argv = [*before, str(environment.python), "-m", "sglang.launch_server", *flags(arguments)]
        with process.supervised(argv, place.variables, place.log) as child:
            yield Server(f"http://127.0.0.1:{port}", child.pid, place, child)


@contextlib.contextmanager
def serve(environment: Environment, spec: EngineSpec) -> Iterator[Server]:
    """Start a server, and wait until it is ready; it is ended with the block.

    Raises:
        ServerDiedError: before it was ready.
    """
    with launch(environment, spec) as server:
        give_up = time.monotonic() + spec.timeout_s
        while not _ready(server.url):
            died = server.process.poll() is not None
            if died or time.monotonic() > give_up:
                log = server.place.log.read_text(encoding="utf-8", errors="replace")
                raise ServerDiedError(last_error(log) if died else f"not ready within {spec.timeout_s:g} s")
            time.sleep(0.5)
        yield server


def last_error(log: str) -> str:
    """The last line of a log that names an exception, ``AttributeError: ...``; the last line at all where none does.

    What the launcher says when it learns that the scheduler has died of something else is passed over.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # SGLang's own logging may prefix the line; NotImplementedError and KeyError('x') alone are exceptions too.
    named = [found.group(1) for line in lines if (found := re.search(r"((?:[\w.]*)(?:Error|Exception|Exit)\b(?::.*)?)$", line))]
    named = [line for line in named if not line.startswith("EOFError") and "scheduler died" not in line]
    return named[-1] if named else (lines[-1] if lines else "it printed nothing")


@dataclass(frozen=True)
class Workplace:
    """Where a run keeps its files.

    Attributes:
        root: a temporary directory.
        variables: the environment of its processes.
    """

    root: Path
    variables: dict[str, str]

    @property
    def log(self) -> Path:
        """All that its processes print."""
        return self.root / "log.txt"

    @property
    def records(self) -> Path:
        """The plugin's runtime directory."""
        return self.root / "records"

    def observed(self) -> tuple[dict[str, Any], ...]:
        """What has reached the draft so far; see :class:`EngineResult`."""
        try:
            lines = (self.root / "observed.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ()
        return tuple(json.loads(line) for line in lines)


@contextlib.contextmanager
def _workplace(spec: EngineSpec) -> Iterator[Workplace]:
    root = Path(tempfile.mkdtemp(prefix="eagle3-rig-"))
    try:
        (root / "records").mkdir(mode=0o700)
        # Variables of ours that happen to be set here must not reach the run, nor another PYTHONPATH.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "PYTHON"))}
        variables = {
            **inherited,
            **ENVIRONMENT,
            "PYTHONPATH": str(SITE),
            "EAGLE3_RIG_LAUNCHER": str(os.getpid()),
            "EAGLE3_RUNTIME_DIR": str(root / "records"),
            "EAGLE3_RIG_REWIRE": str(root / "rewire.json"),
            **spec.environment,
        }
        labels = models.labels_of(spec.target)
        if labels is not None:
            variables["EAGLE3_RIG_OBSERVE"] = json.dumps({"file": str(root / "observed.jsonl"), "labels": asdict(labels)})
        yield Workplace(root, variables)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of `sglang.Engine` as flags of `launch_server`."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is not False and value is not None:
            found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
