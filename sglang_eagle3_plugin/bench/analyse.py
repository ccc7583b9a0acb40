"""From measurements to statements: medians and ranges, what pays, what a step costs, and why EAGLE-3 loses where it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sglang_eagle3_plugin.bench.measure import Measurement
from sglang_eagle3_plugin.bench.plan import BASELINE, Setting
from sglang_eagle3_plugin.bench.store import Store
from sglang_eagle3_plugin.server import acceptance
from sglang_eagle3_plugin.server.acceptance import Acceptance

_LOW_FIRST = 0.4
"""A first draft accepted less often than this is a poor draft, or a miswired one."""
_RARE = 0.1
"""A position accepted in fewer steps than this is not worth drafting."""
_ENOUGH_RUNS = 3
CLEAR = 0.7
"""Fewer runs than that settle only what is beyond this ratio, one way or the other: two runs of equals lie apart by chance alone
in one case of three. Of n runs each, that is 2 / C(2n, n): one in ten for 3, one in 126 for 5. A setting that reaches less of the
baseline gets no further run, and no larger batch, where drafting pays less."""


@dataclass(frozen=True)
class Row:
    """One case at one batch size, over its repeats."""

    case: str
    batch: int
    repeats: int
    """Runs, of it and of the baseline, whichever are fewer."""
    tokens_per_s: tuple[float, float, float]
    """Median, least, most."""
    ttft_s: tuple[float, float, float]
    step_s: float
    """Median, seconds."""
    ratio: tuple[float, float, float] | None
    """To the baseline of the same batch: of the medians, and the least and the most that the ranges allow. None: no baseline."""
    acceptance: Acceptance
    step_cost: float | None
    """A step in steps of the baseline: what must be exceeded by the acceptance length for EAGLE-3 to pay."""
    same_answers: float | None
    """Share of answers equal to the baseline's, 0 to 1. Below 1 where rounding tips a near tie; far below, something is wrong."""
    draft_share: float | None = None
    """Estimated from the slope of the step time over num_steps; None with one length of chain only."""


def rows(store: Store) -> list[Row]:
    """One row a case and batch size that was measured, the baseline's first."""
    keys = dict.fromkeys((m.case, m.batch) for m in store.measurements)
    ordered = sorted(keys, key=lambda key: (key[1], key[0] != BASELINE))
    return [_row(case, batch, store.of(case, batch), store.of(BASELINE, batch)) for case, batch in ordered]


def with_draft_shares(found: Sequence[Row]) -> list[Row]:
    """Add the draft's estimated share of a step: the step time of chains grows by one draft step for each of num_steps."""
    settings = filter(None, (Setting.named(row.case) for row in found))
    chains = {setting.name: setting.num_steps for setting in settings if setting.topk == 1}
    shares: dict[tuple[str, int], float] = {}
    for batch in {row.batch for row in found}:
        points = [(chains[row.case], row.step_s) for row in found if row.batch == batch and row.case in chains]
        slope = _slope(points)
        if slope is not None:
            for row in found:
                if row.batch == batch and row.case in chains:
                    shares[row.case, batch] = min(max(slope * chains[row.case] / row.step_s, 0.0), 1.0)
    return [Row(**{**vars(row), "draft_share": shares.get((row.case, row.batch))}) for row in found]


def gains(row: Row) -> bool:
    """Whether a case beats the baseline beyond the ranges: its slowest run is faster than the baseline's fastest."""
    return row.ratio is not None and row.ratio[1] > 1 and (row.repeats >= _ENOUGH_RUNS or row.ratio[0] > 1 / CLEAR)


def loses(row: Row) -> bool:
    """Whether a case is slower than the baseline beyond the ranges. One that neither gains nor loses is undecided."""
    return row.ratio is not None and row.ratio[2] < 1 and (row.repeats >= _ENOUGH_RUNS or row.ratio[0] < CLEAR)


def best(found: Sequence[Row], batch: int) -> Row:
    """The case to serve this batch size with: the fastest of those that gain, else the baseline."""
    here = [row for row in found if row.batch == batch]
    baseline = next((row for row in here if row.case == BASELINE), None)
    candidates = here if baseline is None else [row for row in here if gains(row)] or [baseline]
    return max(candidates, key=lambda row: row.tokens_per_s[0])


def stops_paying(found: Sequence[Row]) -> int | None:
    """The smallest batch size from which on no measured setting gains; None when the largest still pays."""
    batches = sorted({row.batch for row in found})
    losing = None
    for batch in reversed(batches):
        if best(found, batch).case != BASELINE:
            break
        losing = batch
    return losing


def why_it_loses(row: Row, *, graphs_off: bool, smallest: Row | None = None) -> list[str]:
    """The reasons why a case is slower than the baseline, the plainest first.

    Args:
        row: a row that loses, see :func:`loses`.
        graphs_off: its server runs without CUDA graphs.
        smallest: the same case at the smallest batch.
    """
    reasons = []
    rates = row.acceptance.rates()
    if row.step_cost is not None:
        step = f"a step costs {row.step_cost:.2f} of the baseline's and yields {row.acceptance.length:.2f} tokens"
        outside = row.step_cost < row.acceptance.length
        reasons.append(f"{step}, a gain by itself: the time is lost outside the steps" if outside else step)
    if rates and rates[0] < _LOW_FIRST:
        reasons.append(
            f"acceptance is too low: the first draft is accepted in {rates[0]:.0%} of the steps (see `sglang-eagle3 doctor`)"
        )
    elif not rates and row.acceptance.length < 1 + _LOW_FIRST:
        # No histogram before 0.5.9: the first draft is accepted no more often than drafts are at all.
        drafts = max(row.acceptance.length - 1, 0.0)
        reasons.append(f"acceptance is too low: {drafts:.2f} drafts are accepted a step (see `sglang-eagle3 doctor`)")
    elif rare := [position for position, rate in enumerate(rates, 1) if rate < _RARE]:
        reasons.append(f"too many drafts: from position {rare[0]} on they are accepted in less than {_RARE:.0%} of the steps")
    if graphs_off:
        reasons.append("CUDA graphs are off: each of the draft's small steps pays its launches in full")
    if smallest is not None and smallest.step_cost and row.step_cost and row.step_cost > 1.3 * smallest.step_cost:
        grown = f"verifying costs {row.step_cost:.2f} baseline steps here and {smallest.step_cost:.2f} at {smallest.batch}"
        reasons.append(f"the batch is too large: {grown}")
    return reasons


def ratio(own: Sequence[Measurement], baseline: Sequence[Measurement]) -> tuple[float, float, float]:
    """Throughput against the baseline's: of the medians, and the least and the most that the ranges allow."""
    speed, base = (_spread([m.tokens_per_s for m in runs]) for runs in (own, baseline))
    return speed[0] / base[0], speed[1] / base[2], speed[2] / base[1]


def _row(case: str, batch: int, own: list[Measurement], baseline: list[Measurement]) -> Row:
    is_baseline = case == BASELINE
    step_cost = same = None
    if baseline:
        step_cost = median(m.step_s for m in own) / median(m.step_s for m in baseline)
        pairs = list(zip(own[0].digests, baseline[0].digests, strict=False))
        same = sum(a == b for a, b in pairs) / len(pairs)
    return Row(
        case=case,
        batch=batch,
        repeats=min(len(own), len(baseline)) if baseline else len(own),
        tokens_per_s=_spread([m.tokens_per_s for m in own]),
        ttft_s=_spread([m.ttft_s for m in own]),
        step_s=median(m.step_s for m in own),
        ratio=ratio(own, baseline) if baseline and not is_baseline else None,
        acceptance=acceptance.total(m.acceptance for m in own),
        step_cost=None if is_baseline else step_cost,
        same_answers=None if is_baseline else same,
    )


def _spread(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    """Least squares; None for fewer than two distinct abscissae."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
