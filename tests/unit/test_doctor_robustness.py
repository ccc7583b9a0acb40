"""Whatever a config or a header holds, the doctor answers or says a sentence: no traceback, no hang, no allocation beyond the file.

The default run tries about a thousand inputs; `DOCTOR_INPUTS=10000` is the acceptance run (recorded in benchmarks/doctor.md).
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_making import draft_config, draft_tensors, good_pair, target_config, write_config, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_eagle3_plugin.doctor import examine, load
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import for_json
from sglang_eagle3_plugin.doctor.flags import parse
from sglang_eagle3_plugin.doctor.wiring import as_json
from sglang_eagle3_plugin.errors import UserError

INPUTS = int(os.environ.get("DOCTOR_INPUTS", "1000"))
SLOWEST_S = 2.0

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5))
FIELDS = sorted(
    {
        *target_config(),
        *draft_config([1]),
        "text_config",
        "rope_scaling",
        "quantization_config",
        "speculators_model_type",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "target_hidden_size",
        "fc_norm",
        "norm_before_fc",
        "norm_output",
    }
)
eagle = st.dictionaries(
    st.sampled_from(["eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"]),
    values | st.lists(st.integers(), max_size=6),
)
changes = st.dictionaries(st.sampled_from(FIELDS), values | eagle | st.integers(-2, 1 << 62), max_size=6)


def judge(target: Path, draft: Path, release: str = "0.5.9", flags: str = "--speculative-algorithm EAGLE3 --tp 2") -> str:
    """Run everything that `doctor --json` runs; return the first word of what came of it."""
    began = time.perf_counter()
    try:
        environ = {"HF_HUB_CACHE": "/nowhere"}
        d = Deployment(load.target(str(target), environ), load.draft(str(draft), environ), parse(flags.split()), release)
        json.dumps([for_json(examine(d)), as_json(d)])
        result = "judged"
    except UserError as error:
        result = "refused" if "\n" not in str(error) else "more than a sentence"
    assert time.perf_counter() - began < SLOWEST_S
    return result


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return good_pair(tmp_path_factory.mktemp("pair"), [1, 3, 4])


@settings(max_examples=INPUTS * 4 // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(of_target=changes, of_draft=changes, release=st.sampled_from(["0.5.9", "0.5.13", "0.5.23", "a fork"]))
def test_any_config_is_judged(pair: tuple[Path, Path], of_target: dict[str, Any], of_draft: dict[str, Any], release: str) -> None:
    target, draft = pair
    write_config(target, target_config() | of_target)
    write_config(draft, draft_config([1, 3, 4]) | of_draft)
    assert judge(target, draft, release) == "judged"


@settings(max_examples=INPUTS // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=st.dictionaries(st.text(max_size=10), values, max_size=5), data=st.binary(max_size=64))
def test_any_header_is_judged_or_refused(pair: tuple[Path, Path], header: dict[str, Any], data: bytes) -> None:
    target, draft = pair
    write_config(target, target_config())
    write_config(draft, draft_config([1, 3, 4]))
    text = json.dumps(header).encode()
    (draft / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert judge(target, draft) in ("judged", "refused")


def test_damaged_bytes_are_judged_or_refused(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path, [1, 3, 4])
    chance = random.Random(6)
    originals = {file: file.read_bytes() for file in (draft / "config.json", draft / "model.safetensors", target / "config.json")}
    results = set()
    for _ in range(INPUTS // 2):
        file, original = chance.choice(sorted(originals.items()))
        damaged = bytearray(original[: chance.randrange(len(original))] if chance.random() < 0.2 else original)
        for _ in range(chance.randrange(1, 6)):
            if damaged:
                # The header comes first, and that is where damage matters.
                damaged[chance.randrange(min(len(damaged), 3000))] = chance.randrange(256)
        file.write_bytes(damaged)
        results.add(judge(target, draft, chance.choice(["0.5.9", "0.5.23"])))
        file.write_bytes(original)
    assert results == {"judged", "refused"}


def test_a_header_that_claims_too_much_costs_nothing(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    tensors = draft_tensors()
    write_safetensors(draft / "model.safetensors", tensors)
    whole = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    import tracemalloc

    tracemalloc.start()
    assert judge(target, draft) == "refused"
    assert tracemalloc.get_traced_memory()[1] < 4 * len(whole) + 2_000_000
    tracemalloc.stop()
