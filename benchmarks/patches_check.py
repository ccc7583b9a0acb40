"""How long `patches check` takes: every series against every release's wheel, warm.

usage: python benchmarks/patches_check.py

For each pair of series and wheel the state is found by the files' hashes; where they belong together the patches are carried out in
a scratch repository, and the result's hashes compared. Must hold: 60 s for all pairs,
warm, so the second of two rounds is told. The wheels come from the cache.
"""

from __future__ import annotations

import json
import time

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.series import catalog, transaction, tree


def main() -> None:
    """Check all pairs, twice: the first round warms the file cache."""
    entries = catalog.load()
    wheels = {r: next(iter(sorted(cache.directory("wheels").glob(f"sglang-{r}-*.whl")))) for r in entries}
    for _ in range(2):
        started, states = time.perf_counter(), dict[str, int]()
        for wheel in wheels.values():
            opened = tree.open_tree(wheel)
            for series in entries:
                report = tree.examine(opened, entries, series)
                states[report.state.value] = states.get(report.state.value, 0) + 1
                if report.state is tree.State.CLEAN and report.entry:
                    transaction.patch(report.entry, {path: opened.read(path) for path in report.entry.files})
        figures = {
            "series": len(entries),
            "wheels": len(wheels),
            "seconds": round(time.perf_counter() - started, 1),
            "states": states,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
