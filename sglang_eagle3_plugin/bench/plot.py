"""The findings as a picture. The only module that needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from pathlib import Path

from sglang_eagle3_plugin.bench.plan import BASELINE
from sglang_eagle3_plugin.bench.report import Findings
from sglang_eagle3_plugin.errors import UserError

_MOST_LINES = 8
"""More lines than this cannot be told apart: the best ones are drawn."""


def save(found: Findings, path: Path) -> None:
    """Draw throughput against the baseline over the batch size, and acceptance over the position.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("the plot needs matplotlib; pip install 'sglang-eagle3-plugin[bench]'") from error
    cases = list(dict.fromkeys(row.case for row in found.rows if row.case != BASELINE))
    cases = sorted(cases, key=lambda case: -max(row.tokens_per_s[0] for row in found.rows if row.case == case))[:_MOST_LINES]
    # A Figure of its own needs no display and leaves pyplot's state alone.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ratios, rates = figure.subplots(1, 2)
    ratios.axhline(1, color="black", linewidth=1, label="baseline")
    for number, case in enumerate(sorted(cases)):
        own = [row for row in found.rows if row.case == case]
        drawn = [row for row in own if row.ratio is not None]
        middle = [row.ratio[0] for row in drawn if row.ratio]
        below = [row.ratio[0] - row.ratio[1] for row in drawn if row.ratio]
        above = [row.ratio[2] - row.ratio[0] for row in drawn if row.ratio]
        style = {"marker": "osDv^<>P"[number % 8], "color": f"C{number}", "capsize": 3}
        ratios.errorbar([row.batch for row in drawn], middle, yerr=[below, above], label=case, **style)
        by_position = own[0].acceptance.rates()
        rates.plot(
            range(1, len(by_position) + 1),
            [100 * rate for rate in by_position],
            marker=style["marker"],
            color=style["color"],
            label=case,
        )
    ratios.set_xscale("log", base=2)
    ratios.set_xticks(found.batches, [str(batch) for batch in found.batches])
    ratios.set_ylim(bottom=0)
    ratios.set_xlabel("requests at once")
    ratios.set_ylabel("throughput, baseline = 1")
    ratios.set_title("Where EAGLE-3 pays: above the line")
    ratios.legend(fontsize="small")
    rates.set_ylim(0, 102)
    rates.xaxis.get_major_locator().set_params(integer=True)
    rates.set_xlabel("position of the draft")
    rates.set_ylabel("accepted, % of all steps")
    rates.set_title("Acceptance by position")
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
