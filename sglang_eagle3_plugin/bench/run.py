"""Running the plan: one server after the other, each batch size, each repeat; what cannot win is left out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sglang_eagle3_plugin.bench import analyse
from sglang_eagle3_plugin.bench.measure import measure, warm_up
from sglang_eagle3_plugin.bench.plan import BASELINE, Setting
from sglang_eagle3_plugin.bench.store import Store
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.rig import process
from sglang_eagle3_plugin.server import prompts
from sglang_eagle3_plugin.server.address import client, parse
from sglang_eagle3_plugin.server.generate import Prompt, ServerInfo, server_info
from sglang_eagle3_plugin.server.wait import wait

_REQUEST_S = 900.0
_DEATH_S = 10.0
"""A request breaks off before its server is gone: how long to find out."""
_USELESS_POSITION = 0.05
"""When a chain's last position is accepted in fewer steps than this, a longer chain cannot be worth its step."""


@dataclass(frozen=True)
class Job:
    """What the user asked for."""

    batches: Sequence[int]
    repeats: int
    requests: int
    """At least so many a run; more where a batch needs them."""
    max_tokens: int
    seed: int
    prompts: list[dict[str, Any]] | None
    """None: the built-in set, or random ids for a server without a tokenizer."""
    settings: Sequence[Setting] = ()
    target: str = ""
    draft: str = ""
    python: str = ""
    flags: Sequence[str] = ()
    """Further flags of ``sglang.launch_server``, for the baseline and for EAGLE-3."""
    start_timeout_s: float = 1800.0
    urls: dict[str, str] = field(default_factory=dict)
    """Case -> a server that runs already; then none is started."""
    api_key: str | None = None


Say = Callable[[str], None]


def run(job: Job, store: Store, logs: Path, say: Say) -> None:
    """Measure everything that the store does not hold yet.

    Raises:
        UserError: the baseline's server does not start, a server is not what it is taken for, or a request fails. A setting whose
            server does not start, or dies, is left out this time.
    """
    cases: list[tuple[str, Setting | None]] = [(BASELINE, None), *((setting.name, setting) for setting in job.settings)]
    if job.urls:
        cases = [(case, None) for case in job.urls]
    for case, setting in cases:
        if setting is not None and (why := _too_long(setting, job, store)):
            _skip_rest(case, job, store, why, say)
        due = [batch for batch in job.batches if _is_due(case, batch, job, store)]
        if due:
            try:
                with _server(case, setting, job, logs, say) as http:
                    _batches(http, case, due, job, store, say)
            except _ServerFailedError as error:
                if case == BASELINE:
                    raise UserError(f"the baseline's {error}") from error
                _skip_rest(case, job, store, f"its {error}", say, for_good=False)
        for batch in job.batches:
            if not store.of(case, batch) and (case, batch) not in store.skipped and (why := _hopeless(case, batch, job, store)):
                _leave_out(case, batch, why, store, say)


def _is_due(case: str, batch: int, job: Job, store: Store) -> bool:
    missing = (case, batch) not in store.skipped and len(store.of(case, batch)) < job.repeats
    return missing and not _hopeless(case, batch, job, store)


def _hopeless(case: str, batch: int, job: Job, store: Store) -> str:
    """Why a batch size is not worth another run, by itself or a smaller one; or an empty string."""
    for tried in (other for other in job.batches if other <= batch):
        own, baseline = store.of(case, tried), store.of(BASELINE, tried)
        ratio = analyse.ratio(own, baseline)[0] if own and baseline else 1.0
        if ratio < analyse.CLEAR:
            return f"at batch {tried} it reached {ratio:.2f} of the baseline"
    return ""


def _leave_out(case: str, batch: int, why: str, store: Store, say: Say, *, for_good: bool = True) -> None:
    store.skip(case, batch, why, for_good=for_good)
    say(f"{case}, batch {batch}: left out, {why}")


def _batches(http: httpx.Client, case: str, due: list[int], job: Job, store: Store, say: Say) -> None:
    info = server_info(http)
    if (case == BASELINE) == bool(info.algorithm):
        what = f"speculates ({info.algorithm})" if info.algorithm else "does not speculate"
        raise UserError(
            f"{case}: its server at {http.base_url} {what}; give the baseline's server without a draft, the other with one"
        )
    store.server(case, asdict(info))
    ready = _prompts(http, info, job, store, say)
    used = max(max(job.requests, 2 * batch) for batch in due)
    if job.prompts is not None and used < len(ready):
        say(f"the first {used} of {len(ready)} prompts are sent; raise --requests for more")
    for batch in due:
        if not _is_due(case, batch, job, store):
            continue
        chosen = _chosen(ready, batch, job)
        say(f"{case}, batch {batch}: warm-up")
        warm_up(http, chosen, batch, job.max_tokens)
        while _is_due(case, batch, job, store):
            repeat = len(store.of(case, batch))
            say(f"{case}, batch {batch}: run {repeat + 1} of {job.repeats}")
            store.add(measure(http, chosen, case, batch, repeat, job.max_tokens))
            if not store.measurements[-1].flushed:
                say(f"{case}: its server does not empty its prefix cache")


def _prompts(http: httpx.Client, info: ServerInfo, job: Job, store: Store, say: Say) -> list[Prompt]:
    """The same for every server: messages are templated once, by the first."""
    if store.prompts is not None:
        return store.prompts
    if job.prompts is None and info.takes_ids_only:
        return list(prompts.random_ids(max(job.requests, 2 * max(job.batches)), 32, job.seed))
    whole = job.prompts if job.prompts is not None else prompts.built_in()
    ready, templated = prompts.for_server(http, whole)
    if not templated:
        say("prompts go in as plain text: this release's /tokenize takes no messages")
    if ready != whole:
        store.keep_prompts(ready)
    return ready


def _chosen(ready: list[Prompt], batch: int, job: Job) -> list[Prompt]:
    # At least two rounds, so that the batch is full for most of the run.
    count = max(job.requests, 2 * batch)
    return [ready[i % len(ready)] for i in range(count)]


def _too_long(setting: Setting, job: Job, store: Store) -> str:
    if setting.topk != 1:
        return ""
    for shorter in job.settings:
        if shorter.topk != 1 or shorter.num_steps >= setting.num_steps:
            continue
        measured = store.of(shorter.name, job.batches[0])
        if not measured or (measured[0].acceptance.accepted and not measured[0].acceptance.histogram):
            continue  # before 0.5.9 nothing is said of positions
        rates = measured[0].acceptance.rates()
        if len(rates) < shorter.num_steps or rates[-1] < _USELESS_POSITION:
            return (
                f"with {shorter.num_steps} steps the last draft was already accepted in less than {_USELESS_POSITION:.0%} of them"
            )
    return ""


def _skip_rest(case: str, job: Job, store: Store, why: str, say: Say, *, for_good: bool = True) -> None:
    for batch in job.batches:
        if len(store.of(case, batch)) < job.repeats and (case, batch) not in store.skipped:
            _leave_out(case, batch, why, store, say, for_good=for_good)


class _ServerFailedError(Exception):
    """One started here did not start, or died."""


@contextlib.contextmanager
def _server(case: str, setting: Setting | None, job: Job, logs: Path, say: Say) -> Iterator[httpx.Client]:
    """A client for the case's server: one that runs, or one started here and ended afterwards."""
    if case in job.urls:
        with client(parse(job.urls[case]), timeout_s=_REQUEST_S, api_key=job.api_key) as http:
            yield http
        return
    port = process.free_port()
    argv = [job.python, "-m", "sglang.launch_server", "--model-path", job.target, "--host", "127.0.0.1", "--port", str(port)]
    if setting is not None:
        argv += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", job.draft, *setting.flags]
    argv += job.flags
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{case.replace(', ', '-').replace(' ', '')}.log"
    address = parse(f"127.0.0.1:{port}")
    say(f"{case}: starting its server (log: {log})")
    try:
        with process.supervised(argv, os.environ, log) as child:
            result = wait(address, pid=child.pid, log=log, timeout_s=job.start_timeout_s)
            if result.state != "ready":
                raise _ServerFailedError(f"server did not start: {result.reason} (log: {log})")
            with client(address, timeout_s=_REQUEST_S, api_key=job.api_key) as http:
                try:
                    yield http
                except UserError as error:
                    now = wait(address, pid=child.pid, log=log, timeout_s=_DEATH_S)
                    if now.state == "ready":
                        raise
                    raise _ServerFailedError(f"server failed: {now.reason}; {error} (log: {log})") from error
    except FileNotFoundError as error:
        raise UserError(f"{job.python} cannot be run ({error.strerror}); give --python the interpreter that has SGLang") from error
