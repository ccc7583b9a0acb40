"""What a user sees of the doctor: the seeded story, clean pairs, files, flags, fixes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_making import draft_config, draft_tensors, good_pair, int64s, target_config, write_config, write_safetensors
from click.testing import CliRunner
from doctor_cases import DRAFTS
from doctor_running import run, severe

from sglang_eagle3_plugin import releases
from sglang_eagle3_plugin.cli.doctor import command
from sglang_eagle3_plugin.doctor import examine
from sglang_eagle3_plugin.doctor.deployment import Deployment, Model
from sglang_eagle3_plugin.doctor.findings import Finding, verdict
from sglang_eagle3_plugin.doctor.flags import parse
from sglang_eagle3_plugin.doctor.startup import certain_faults
from sglang_eagle3_plugin.doctor.wiring import as_json
from sglang_eagle3_plugin.errors import UserError

RELEASES = ["0.5.9", "0.5.10.post1", "0.5.13", "0.5.18", "0.5.23"]


def judged(target: Path, draft: Path, *rest: str, release: str = "0.5.23") -> list[str]:
    return severe(run("--target", str(target), "--draft", str(draft), "--release", release, *rest)[1]["findings"])


def test_the_seeded_story_is_three_errors_with_three_fixes(tmp_path: Path) -> None:
    target = write_config(
        tmp_path / "target",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "max_position_embeddings": 4096},
        },
    )
    draft = write_config(tmp_path / "draft", draft_config([-1, 2, 30], hidden_size=7168, vocab_size=163840, draft_vocab_size=32000))
    tensors = draft_tensors(7168, 3, 32000)
    tensors["d2t"] = ("I64", [32000], int64s([i * 4 for i in range(32000)]))
    tensors.pop("t2d")
    write_safetensors(draft / "model.safetensors", tensors)
    code, said = run(
        "--target",
        str(target),
        "--draft",
        str(draft),
        "--release",
        "0.5.23",
        "--",
        "--speculative-algorithm",
        "EAGLE",
        "--tp-size",
        "8",
    )
    errors = {f["id"]: f for f in said["findings"] if f["severity"] == "error"}
    assert code == 1
    assert said["verdict"] == "error"
    assert set(errors) == {"ERR_FLAG_EAGLE_FOR_EAGLE3", "ERR_LAYER_ID_RANGE", "ERR_FC_WIDTH"}
    assert "EAGLE3" in errors["ERR_FLAG_EAGLE_FOR_EAGLE3"]["fix"]
    assert "[2, 30, 58]" in errors["ERR_LAYER_ID_RANGE"]["fix"]
    assert "21504 = 3 x 7168" in errors["ERR_FC_WIDTH"]["message"]
    assert "7168 = 1 x 7168" in errors["ERR_FC_WIDTH"]["message"]
    assert all(f["evidence"] and f["fix"] for f in errors.values())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("ids", [None, [1, 3, 4]])
def test_a_good_pair_is_clean_on_every_release(tmp_path: Path, release: str, ids: list[int] | None) -> None:
    target, draft = good_pair(tmp_path, ids)
    code, said = run(
        "--target", str(target), "--draft", str(draft), "--release", release, "--", "--speculative-algorithm", "EAGLE3"
    )
    assert (code, said["verdict"], severe(said["findings"])) == (0, "ok", [])
    assert said["wiring"]["wanted"] == [2, 4, 5]
    assert said["wiring"]["stock"] == {"cuda_graph": [2, 4, 5], "eager": [2, 4, 5]}


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda d: d["model"])
def test_every_known_draft_config_gets_its_convention(draft: dict[str, Any]) -> None:
    config = {k: v for k, v in draft["fields"].items() if isinstance(v, (int, bool)) or k == "speculators_model_type"}
    config |= {"architectures": [draft["draft_architecture"]], "_name_or_path": draft["model"]}
    if draft["layer_ids"]:
        where = config if draft["ids_location"] == "top_level" else config.setdefault("eagle_config", {})
        where["eagle_aux_hidden_state_layer_ids"] = draft["layer_ids"]
        if draft["ids_location"] == "top_level":
            config["speculators_model_type"] = "eagle3"
    depth = draft["target_layers"] or 48
    wiring = as_json(Deployment(Model({"num_hidden_layers": depth}), Model(config)))
    recorded = draft["convention"]
    assert wiring["evidence"]
    if not draft["layer_ids"]:
        # Whatever convention its trainer has, a config without ids means the default boundaries.
        assert wiring["convention"] == "default"
        assert wiring["wanted"] == [2, depth // 2, depth - 3]
    elif recorded.startswith(("AMBIGUOUS", "output_of_layer (presumed)")):
        assert wiring["convention"] == "ambiguous"
        assert set(wiring["readings"]) == {"output", "boundary"}
    else:
        expected = {"output_of_layer": "output", "boundary": "boundary", "boundary (speculators)": "boundary"}[recorded]
        # "lightseekorg/... (published)": the model's name in a config has no remark.
        named = as_json(
            Deployment(Model({"num_hidden_layers": depth}), Model(config | {"_name_or_path": draft["model"].split(" ")[0]}))
        )
        assert named["convention"] == expected
        assert named["wanted"] == draft["true_capture_boundaries"]


def test_a_fixed_config_has_no_fault_left_and_the_old_one_is_untouched(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    write_config(draft, draft_config([1, 3, 9], num_hidden_layers=8, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False))
    before = (draft / "config.json").read_bytes()
    out = tmp_path / "kopie-süß.json"
    pair = ("--target", str(target), "--draft", str(draft), "--release", "0.5.23")
    found = severe(run(*pair, "--fix-config", str(out))[1]["findings"])
    assert {"ERR_DRAFT_DEPTH", "ERR_ARCH_NOT_EAGLE3", "ERR_LAYER_ID_RANGE"} <= set(found)
    assert (draft / "config.json").read_bytes() == before
    (draft / "config.json").write_bytes(out.read_bytes())
    assert run(*pair)[1]["verdict"] == "ok"
    with pytest.raises(UserError, match="not overwritten"):
        run(*pair, "--fix-config", str(out))


def change(tmp_path: Path, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> tuple[Path, Path]:
    target, draft = good_pair(tmp_path, [1, 3, 4])
    write_config(draft, draft_config([1, 3, 4]) | (config or {}))
    kept = {k: v for k, v in (draft_tensors() | (tensors or {})).items() if v is not None}
    write_safetensors(draft / "model.safetensors", kept)
    return target, draft


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({}, {"fc.weight": ("BF16", [64, 160])}, "ERR_FC_WIDTH"),
        ({}, {"fc.weight": ("BF16", [64, 128])}, "ERR_AUX_COUNT_MISMATCH"),
        ({"hidden_size": 128}, {}, "ERR_HIDDEN_SIZE"),
        ({"target_hidden_size": 128}, {}, "ERR_HIDDEN_SIZE"),
        ({"num_hidden_layers": 8}, {}, "ERR_DRAFT_DEPTH"),
        ({"architectures": ["Eagle3Speculator"]}, {}, "ERR_DRAFT_ARCH_UNKNOWN"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "ERR_ARCH_NOT_EAGLE3"),
        ({}, {"lm_head.weight": None}, "ERR_LM_HEAD_UNINIT"),
        ({}, {"lm_head.weight": ("BF16", [100, 64])}, "ERR_LM_HEAD_ROWS"),
        ({"draft_vocab_size": 128}, {"d2t": None, "lm_head.weight": ("BF16", [128, 64])}, "ERR_D2T_MISSING"),
        ({"draft_vocab_size": 128, "tie_word_embeddings": True}, {}, "ERR_TIED_HEAD_WITH_REDUCED_VOCAB"),
        ({}, {"d2t": ("I64", [256], int64s(list(range(256))))}, "ERR_D2T_NOT_OFFSET"),
        ({}, {"d2t": ("I64", [256], int64s([1] * 256))}, "ERR_D2T_RANGE"),
        ({}, {"d2t": ("I64", [256], int64s([0, -1, *[0] * 254]))}, "ERR_D2T_NOT_INJECTIVE"),
        ({}, {"d2t": ("I64", [255], int64s([0] * 255))}, "ERR_D2T_SHAPE"),
        ({}, {"t2d": ("BOOL", [256], b"\1" * 255 + b"\0")}, "WARN_T2D_DISAGREES"),
        ({}, {"norm.weight": None}, "ERR_TENSOR_MISSING"),
        ({}, {"midlayer.self_attn.k_proj.weight": None}, "ERR_TENSOR_MISSING"),
        ({}, {"midlayer.self_attn.q_norm.weight": ("BF16", [64])}, "WARN_TENSOR_DROPPED"),
        ({"norm_before_residual": True}, {}, "ERR_NORM_FLAG_IGNORED"),
        ({}, {"input_norm.weight": ("BF16", [192])}, "ERR_NORM_FLAG_IGNORED"),
        ({"max_position_embeddings": 2048}, {}, "WARN_MAXPOS"),
        ({"vocab_size": 300}, {}, "WARN_VOCAB_DIFFERS"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,3,4"}}, {}, "ERR_CONFIG_MALFORMED"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 3]}}, {}, "ERR_LAYER_ID_ORDER"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 3]}}, {}, "ERR_LAYER_ID_DUPLICATE"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, {}, "ERR_FINAL_BOUNDARY_UNSUPPORTED"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, {}, "ERR_AUX_COUNT_MISMATCH"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, {}, "ERR_CONFIG_IDS_IGNORED"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, {}, "WARN_CONFIG_IDS_DISAGREE"),
        (
            {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
            {},
            "WARN_IDS_WITHOUT_AUX",
        ),
        ({"hidden_size": 192}, {"fc.weight": ("BF16", [192, 192])}, "ERR_FC_SKIPPED"),
        ({}, {"d2t": ("F32", [256])}, "ERR_D2T_SHAPE"),
        ({}, {"d2t": ("I64", [256, 1])}, "ERR_D2T_SHAPE"),
        (
            {"draft_vocab_size": 128},
            {"d2t": ("I64", [128], int64s(list(range(128, 256)))), "lm_head.weight": ("BF16", [128, 64])},
            "ERR_D2T_NOT_OFFSET",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_change_to_a_good_draft_is_found(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], expected: str
) -> None:
    assert expected in judged(*change(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--speculative-algo EAGLE", "ERR_FLAG_EAGLE_FOR_EAGLE3"),
        ("--speculative-algorithm=NEXTN", "ERR_FLAG_EAGLE_FOR_EAGLE3"),
        ("--speculative-algorithm NGRAM", "ERR_FLAG_NOT_EAGLE3"),
        ("--speculative-draft-model x", "ERR_FLAG_ALGORITHM_MISSING"),
        ("python -m sglang.launch_server --speculative-algorithm EAGLE3 --pp 2", "ERR_PP_CAPTURE_LOST"),
        ("--speculative-algorithm EAGLE3 --dp=4 --enable-dp-attention", "WARN_DP_ATTENTION"),
        ("--speculative-algorithm EAGLE3 --quantization awq", "ERR_QUANT_INHERIT"),
        ("--speculative-algorithm EAGLE3 --context-length 8192", "WARN_MAXPOS"),
        ("--speculative-algorithm EAGLE3 --enable-return-hidden-states", "ERR_DUMP_UNDER_SPECULATION"),
    ],
)
def test_flags_are_read_as_sglang_reads_them(tmp_path: Path, flags: str, expected: str) -> None:
    target, draft = good_pair(tmp_path)
    assert expected in judged(target, draft, "--", *flags.split())


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ("accept_len 1.00", "WARN_NOTHING_ACCEPTED"),
        ("acceptance length: 1.6 on MT-Bench", "OK_WIRING_LOW_QUALITY"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x128 and 192x64)", "ERR_FC_WIDTH"),
        ("KeyError: 'model.midlayer.self_attn.qkv_proj.weight'", "ERR_ARCH_NOT_EAGLE3"),
        ("ValueError: X does not support EAGLE3: it has no set_eagle3_layers_to_capture", "ERR_WRAPPER_NO_HOOKS"),
        ("AttributeError: 'X' object has no attribute 'get_embed_and_head'", "ERR_WRAPPER_PARTIAL_HOOKS"),
        ("64 vs 32", "ERR_EMBED_WIDTH"),
    ],
)
def test_what_was_seen_of_a_run_is_explained(tmp_path: Path, observed: str, expected: str) -> None:
    target, draft = good_pair(tmp_path)
    pair = ("--target", str(target), "--draft", str(draft), "--release", "0.5.23")
    assert expected in [f["id"] for f in run(*pair, "--observed", observed)[1]["findings"]]
    (tmp_path / "server.log").write_text(f"loading\n{observed}\n")
    assert expected in [f["id"] for f in run(*pair, "--log", str(tmp_path / "server.log"))[1]["findings"]]


@pytest.mark.parametrize(
    ("release", "flags", "expected"),
    [
        ("0.5.9", "--speculative-algorithm EAGLE3 --quantization awq", "ERR_QUANT_INHERIT"),
        ("0.5.9", "--enable-return-aux-hidden-states", "ERR_FLAG_UNKNOWN"),
        ("0.5.23", "--speculative-algorithm EAGLE3 --tp-size two", None),
    ],
)
def test_a_flag_is_judged_by_the_release(tmp_path: Path, release: str, flags: str, expected: str | None) -> None:
    found = judged(*good_pair(tmp_path), "--", *flags.split(), release=release)
    assert found == [] if expected is None else expected in found


def test_eagle3_is_the_wrong_flag_for_a_draft_of_the_first_eagle(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    first = draft_config(architectures=["LlamaForCausalLMEagle"])
    del first["eagle_config"], first["draft_vocab_size"]
    write_config(draft, first)
    write_safetensors(draft / "model.safetensors", {"fc.weight": ("BF16", [64, 128])})
    assert "ERR_FLAG_EAGLE3_FOR_EAGLE" in judged(target, draft, "--", "--speculative-algorithm", "EAGLE3")


def test_a_plugin_that_is_turned_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_PLUGIN", "0")
    assert "WARN_PLUGIN_OFF" in judged(*good_pair(tmp_path), "--plugin")


def test_embeddings_of_a_draft_are_compared_with_the_targets(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)

    def noted(rows: bytes) -> list[str]:
        write_safetensors(draft / "model.safetensors", draft_tensors() | {"embed_tokens.weight": ("BF16", [256, 64], rows)})
        found = run("--target", str(target), "--draft", str(draft), "--release", "0.5.23")[1]["findings"]
        return [f["id"] for f in found if "EMBED" in f["id"]]

    assert noted(bytes(256 * 64 * 2)) == []
    assert noted(b"\1" * (256 * 64 * 2)) == ["INFO_EMBED_DIFFERS_FROM_TARGET"]


def test_launch_flags_alone_name_the_models(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    line = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--speculative-algorithm", "EAGLE"]
    assert "ERR_FLAG_EAGLE_FOR_EAGLE3" in severe(run("--release", "0.5.23", "--", *line)[1]["findings"])


def test_the_plugin_turns_what_it_mends_into_notes(tmp_path: Path) -> None:
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": target_config()}
    target = write_config(tmp_path / "target", kimi)
    draft = write_config(tmp_path / "draft", draft_config([1, 3, 4]))
    assert "ERR_WRAPPER_NO_HOOKS" in judged(target, draft, release="0.5.9")
    assert judged(target, draft, "--plugin", release="0.5.9") == []


def test_the_report_for_people_begins_with_the_verdict_and_fits_narrow_terminals(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    arguments = ["--target", str(target), "--draft", str(draft), "--release", "0.5.23", "--", "--speculative-algorithm", "EAGLE"]
    text = CliRunner().invoke(command, arguments, standalone_mode=False, env={"COLUMNS": "60"}).output
    assert text.startswith("error: 2 errors")
    assert text.index("ERR_FLAG_EAGLE_FOR_EAGLE3") < text.index("PLUGIN_ALL_PROCESSES")
    assert "fix: Use --speculative-algorithm EAGLE3." in text


@pytest.mark.parametrize("release", RELEASES)
def test_a_server_at_its_start_is_told_only_what_is_certain(release: str) -> None:
    class Arguments:
        speculative_algorithm = "EAGLE3"
        tp_size = 2
        enable_flashinfer_allreduce_fusion = False

    target = target_config()
    assert certain_faults(target, draft_config([1, 3, 4]), None, Arguments(), release) == []
    assert certain_faults(target, draft_config(None, max_position_embeddings=10), None, Arguments(), release) == []
    ids = [f.id for f in certain_faults(target, draft_config([-1, 2, 30]), None, Arguments(), release)]
    assert "ERR_LAYER_ID_RANGE" in ids
    Arguments.speculative_algorithm = "EAGLE"
    assert [f.id for f in certain_faults(target, draft_config(), None, Arguments(), release)] == ["ERR_FLAG_EAGLE_FOR_EAGLE3"]
    Arguments.speculative_algorithm = "EAGLE3"


def test_a_dead_setter_and_partial_sums_are_certain() -> None:
    class Arguments:
        speculative_algorithm = "EAGLE3"
        tp_size = 8
        enable_flashinfer_allreduce_fusion = True

    target = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "hidden_size": 64}
    assert [f.id for f in certain_faults(target, draft_config(), None, Arguments(), "0.5.13")] == ["ERR_TP_PARTIAL_CAPTURE"]
    dead = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": target_config()}
    Arguments.tp_size = 1
    assert [f.id for f in certain_faults(dead, draft_config(), None, Arguments(), "0.5.13", plugin=False)] == ["ERR_CAPTURE_DEAD"]


def test_a_server_that_the_plugin_wires_is_not_stopped_for_what_it_wires() -> None:
    class Arguments:
        speculative_algorithm = "EAGLE3"

    embeddings = draft_config(None, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 3, 7]})
    embeddings["eagle_config"]["eagle_aux_hidden_state_layer_convention"] = "output"
    four = draft_config(None, eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4], num_aux_hidden_states=4)
    newer = draft_config([1, 3, 4], architectures=["SomeEagle3ForCausalLM"])
    for draft, release in ((embeddings, "0.5.23"), (four, "0.5.23"), (newer, "0.6.0"), (newer, "a fork")):
        assert certain_faults(target_config(), draft, None, Arguments(), release) == []
    assert [f.id for f in certain_faults(target_config(), newer, None, Arguments(), "0.5.23")] == ["ERR_DRAFT_ARCH_UNKNOWN"]


def test_severity_follows_the_prefix() -> None:
    assert verdict([Finding("WARN_X", ""), Finding("DUMP_RESUME", "")]) == "warn"
    assert verdict([Finding("ERR_X", ""), Finding("WARN_X", "")]) == "error"
    assert verdict([Finding("OK_WIRING", ""), Finding("PLUGIN_X", "")]) == "ok"


def test_no_class_of_any_release_breaks_a_good_draft() -> None:
    """What is judged by the survey's data must be judgeable for every class in it."""
    for name in releases.class_names():
        for release in RELEASES:
            target = Model(target_config(architectures=[name], num_hidden_layers=48))
            examine(Deployment(target, Model(draft_config([1, 23, 44])), parse(["--tp", "2"]), release))


def test_a_missing_shard_a_swapped_pair_and_notes(tmp_path: Path) -> None:
    target, draft = good_pair(tmp_path)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00002.safetensors"}}))
    assert "ERR_SHARD_MISSING" in judged(target, draft)
    (target / "model.safetensors.index.json").unlink()
    assert "ERR_TARGET_IS_DRAFT" in judged(draft, target)
    write_config(target, target_config(rope_scaling={"mrope_section": [1, 2, 3]}))
    chain = ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "24"]
    code, said = run("--target", str(target), "--draft", str(draft), "--release", "0.5.23", "--", *chain)
    assert code == 0
    assert {"INFO_MROPE", "INFO_DRAFT_TOKENS_ADJUSTED"} <= {f["id"] for f in said["findings"]}
