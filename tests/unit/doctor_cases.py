"""The shared public cases as deployments. What a case tells only in prose is added here, in the form a user would give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.doctor import described, load
from sglang_eagle3_plugin.doctor.deployment import Deployment

DATA = json.loads((Path(__file__).parent.parent / "data" / "cases.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = DATA["cases"]
DRAFTS: list[dict[str, Any]] = DATA["draft_configs"]

_HEADLESS = ["fc.weight", "midlayer.*", "norm.weight"]
PROSE: dict[str, dict[str, Any]] = {
    # "(before head was added)": the file's tensors, without a head
    "D02": {"draft_config": {"tensors": _HEADLESS, "without": "lm_head.weight"}},
    # "a name check ... always dropped the draft-to-target table"
    "D05": {"draft_config": {"tensors": ["midlayer.*"]}},
    # "Up to 0.5.20 ... users see an attribute error", "in 0.5.23 a ValueError names the class"
    "W12": {
        "observed": "AttributeError: 'Glm4vForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'",
    },
    # the vLLM backend reads the list of a ModelOpt head; the converter of llama.cpp reads the top level only
    "L08": {"engine": "vllm"},
    "L10": {"engine": "llama.cpp"},
    # "the user projects 35 TB for 30000 samples" of 65536 tokens
    "H01": {"collect_tokens": 30000 * 65536},
    "H02": {"server_flags": ["--enable-return-hidden-states"]},
    "H04": {"server_flags": ["--enable-return-hidden-states", "--speculative-algorithm EAGLE3"]},
    "X02": {"environ": {"SGLANG_PLUGINS": "another_plugin"}},
}


def deployment(case: dict[str, Any], fork: Path | None = None) -> Deployment:
    """A case as the doctor sees it; ``fork`` is where W03's source tree may be written."""
    added = PROSE.get(case["id"], {})
    draft = case["draft_config"]
    if "draft_config" in added:
        draft = {**draft, **added["draft_config"]}
    d = described.deployment({**case, **added, "draft_config": draft})
    if d.draft and (gone := draft.get("without")):
        assert d.draft.weights
        d.draft.weights.tensors.pop(gone)
    if case["id"] == "W03":
        assert fork is not None
        d.source = load.source_tree(_fork(fork))
    return d


def _fork(root: Path) -> Path:
    """A fork "that predates the K2.5 EAGLE3 hooks": the wrapper without them, its inner model with them."""
    models = root / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "kimi_k25.py").write_text(
        "class KimiK25ForConditionalGeneration(Module):\n"
        "    def __init__(self, config):\n"
        "        self.language_model = DeepseekV3ForCausalLM(config)\n"
        "    def forward(self, x): ...\n"
    )
    (models / "deepseek_v2.py").write_text(
        "class DeepseekV2ForCausalLM(Module):\n"
        "    def set_eagle3_layers_to_capture(self, ids=None): ...\n"
        "    def get_embed_and_head(self): ...\n"
        "class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM): ...\n"
    )
    return root
