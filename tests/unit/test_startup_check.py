"""The check at start lets through whatever it isn't certain of: other kinds of drafts, other programs, classes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_making import draft_config, draft_tensors, target_config, write_config, write_safetensors
from click.testing import CliRunner
from doctor_running import run, severe

from sglang_eagle3_plugin.checkpoints import read_checkpoint
from sglang_eagle3_plugin.cli import doctor, wiring
from sglang_eagle3_plugin.doctor.findings import Finding
from sglang_eagle3_plugin.doctor.startup import certain_faults
from sglang_eagle3_plugin.interpreter import launch_flags
from sglang_eagle3_plugin.runtime import startup
from sglang_eagle3_plugin.settings import Settings

RELEASES = ["0.5.9", "0.5.17", "0.5.23"]
HIDDEN = 64
FIRST_EAGLE = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1}
# name -> target's architecture, draft's config, a tensor of its file, further launch arguments
OTHER_DRAFTS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "EAGLE-2": ("LlamaForCausalLM", FIRST_EAGLE, "fc.weight", {}),
    "Qwen3-Next, its own MTP layer": (
        "Qwen3NextForCausalLM",
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": HIDDEN, "num_hidden_layers": 8},
        "mtp.fc.weight",
        {},
    ),
    "DeepSeek, its own MTP layer, two stages": (
        "DeepseekV3ForCausalLM",
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN, "num_hidden_layers": 8},
        "model.layers.8.eh_proj.weight",
        {"pp_size": 2},
    ),
    "DeepSeek-V4, its own MTP layer": (
        "DeepseekV4ForCausalLM",
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": HIDDEN, "num_hidden_layers": 8},
        "model.layers.8.eh_proj.weight",
        {},
    ),
}


def faults(place: Path, target: dict[str, Any], draft: dict[str, Any], tensors: dict[str, Any], **more: Any) -> list[Finding]:
    release, environ = more.pop("release", "0.5.17"), more.pop("environ", None)
    directory = write_config(place / "draft", draft)
    write_safetensors(directory / "model.safetensors", tensors)
    given = SimpleNamespace(**({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "draft"} | more))
    return certain_faults(target, draft, read_checkpoint(directory), given, release, environ=environ)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", OTHER_DRAFTS)
def test_drafts_that_are_not_of_eagle3_are_none_of_our_business(tmp_path: Path, name: str, release: str) -> None:
    architecture, config, tensor, more = OTHER_DRAFTS[name]
    target = target_config(architectures=[architecture], hidden_size=HIDDEN)
    tensors = {tensor: ("BF16", [HIDDEN, 2 * HIDDEN])}
    assert faults(tmp_path, target, config, tensors, release=release, speculative_algorithm="EAGLE", **more) == []


def test_an_eagle3_draft_served_as_eagle_is_still_refused(tmp_path: Path) -> None:
    found = faults(tmp_path, target_config(), draft_config(), draft_tensors(HIDDEN, 3, 256), speculative_algorithm="EAGLE")
    assert "ERR_FLAG_EAGLE_FOR_EAGLE3" in [fault.id for fault in found]


def test_doctor_says_nothing_of_eagle3_to_an_mtp_launch(tmp_path: Path) -> None:
    architecture, config, tensor, _ = OTHER_DRAFTS["DeepSeek-V4, its own MTP layer"]
    target = write_config(tmp_path / "target", target_config(architectures=[architecture], hidden_size=HIDDEN))
    draft = write_config(tmp_path / "draft", config)
    write_safetensors(draft / "model.safetensors", {tensor: ("BF16", [HIDDEN, 2 * HIDDEN])})
    launch = ("--release", "0.5.23", "--", "--speculative-algorithm", "EAGLE")
    code, said = run("--target", str(target), "--draft", str(draft), *launch)
    assert code == 0, said
    assert severe(said["findings"]) == []


def test_doctor_goes_on_warning_of_dumps_where_another_algorithm_serves(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", target_config())
    launch = ("--model-path", str(target), "--speculative-algorithm", "NGRAM", "--enable-return-hidden-states")
    said = run("--release", "0.5.17", "--", *launch, "--debug-tensor-dump-output-folder", "/tmp/x")[1]
    assert "ERR_DUMP_UNDER_SPECULATION" in severe(said["findings"])


def test_boundaries_asked_for_in_the_environment_are_nothing_to_stock_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_CAPTURE_BOUNDARIES", "1,2,3,4")
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "draft", draft_config(num_aux_hidden_states=3))
    for plugin, found in (("--plugin", True), ("--no-plugin", False)):
        said = run("--target", str(target), "--draft", str(draft), "--release", "0.5.17", plugin)[1]
        assert ("ERR_AUX_COUNT_MISMATCH" in severe(said["findings"])) == found


def test_a_class_that_may_come_from_elsewhere_is_not_refused(tmp_path: Path) -> None:
    unknown = draft_config(architectures=["MyCorpEagle3ForCausalLM"])
    tensors = draft_tensors(HIDDEN, 3, 256)
    (certain,) = faults(tmp_path, target_config(), unknown, tensors)
    assert certain.id == "ERR_DRAFT_ARCH_UNKNOWN"
    assert "parallel" not in certain.message
    assert faults(tmp_path, target_config(), unknown, tensors, release="0.5.17+mycorp.3") == []
    assert faults(tmp_path, target_config(), unknown, tensors, environ={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mycorp"}) == []


def test_a_wrong_number_of_boundaries_is_refused_whoever_named_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, right in (("1,2", False), ("1,3,5", True), ("1,2,3,5", False)):
        found = faults(
            tmp_path, target_config(), draft_config(), draft_tensors(HIDDEN, 3, 256), environ={"EAGLE3_CAPTURE_BOUNDARIES": asked}
        )
        assert [fault.id for fault in found] == ([] if right else ["ERR_AUX_COUNT_MISMATCH"]), asked
    monkeypatch.setenv("EAGLE3_CAPTURE_BOUNDARIES", "1,2")
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "three", draft_config(num_aux_hidden_states=3))
    said = CliRunner().invoke(wiring.command, ["--target", str(target), "--draft", str(draft)], standalone_mode=False)
    assert "the draft takes 3 states, and 2 boundaries are asked for" in said.output


LAUNCH = ["sglang.launch_server", "--model-path", "m"]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["python", "-m", *LAUNCH], LAUNCH[1:]),
        (["python", "-um", *LAUNCH], LAUNCH[1:]),
        (["python", "-W", "ignore", "-X", "dev", "-m", *LAUNCH], LAUNCH[1:]),
        (["python", "/opt/bin/sglang", "serve", "m", "--tp", "2"], ["--model-path", "m", "--tp", "2"]),
        (["python", "/opt/bin/sglang", "serve", "--model-path", "m"], LAUNCH[1:]),
        (["python", "/opt/bin/sglang", "generate", "m"], None),
        (["python", "watchdog.py", "--cmd", "python", "-m", *LAUNCH], None),
        (["python", "-c", "import sglang", "-m", *LAUNCH], None),
        (["python", "-m", "mycorp.supervise", *LAUNCH], None),
        (["python"], None),
    ],
)
def test_only_the_process_that_launches_is_judged_by_its_command_line(words: list[str], flags: list[str] | None) -> None:
    assert launch_flags(words) == flags


def test_a_supervisor_that_names_a_wrong_launch_goes_on(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "draft", draft_config())
    wrong = ["-m", "sglang.launch_server", "--model-path", str(target), "--speculative-algorithm", "EAGLE"]
    wrong += ["--speculative-draft-model-path", str(draft)]
    startup.check_command_line(["python", "watchdog.py", "python", *wrong], Settings())
    with pytest.raises(SystemExit):
        startup.check_command_line(["python", *wrong], Settings())


@pytest.mark.parametrize(
    ("name", "value"), [("EAGLE3_LAYER_CONVENTION", "outputs"), ("EAGLE3_CAPTURE_BOUNDARIES", "x"), ("EAGLE3_STRICT", "perhaps")]
)
def test_commands_whose_answer_hangs_on_a_variable_refuse_one_that_is_mistyped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "draft", draft_config())
    for command in (doctor.command, wiring.command):
        said = CliRunner().invoke(command, ["--target", str(target), "--draft", str(draft)], standalone_mode=False)
        assert name in str(said.exception), said.output
