"""`sglang-eagle3 accept`: the arithmetic, and the command against a stand-in server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standin_server import StandIn, serving

from sglang_eagle3_plugin.cli.main import main
from sglang_eagle3_plugin.server.acceptance import Acceptance, of_meta_info, standard_error, total


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["accept", *argv])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *argv, "--json")
    return code, json.loads(out)


class TestArithmetic:
    def test_of_0_5_23(self) -> None:
        # As printed by a real 0.5.23 for 8 tokens of a draft that is never right.
        meta = {"completion_tokens": 8, "spec_accept_length": 8 / 7, "spec_num_correct_drafts": 0, "spec_verify_ct": 7}
        found = of_meta_info({**meta, "spec_correct_drafts_histogram": [7]})
        assert found == Acceptance(7, 0, (7,))
        assert found.length == 1.0
        assert found.rates() == []

    def test_of_0_5_9(self) -> None:
        found = of_meta_info({"spec_verify_ct": 4, "spec_accept_token_num": 6, "spec_accept_histogram": [1, 1, 1, 1]})
        assert found.length == 2.5
        assert found.rates() == [0.75, 0.5, 0.25]
        assert found.conditional_rates() == pytest.approx([3 / 4, 2 / 3, 1 / 2])

    def test_of_a_release_that_gives_steps_alone(self) -> None:
        assert of_meta_info({"completion_tokens": 13, "spec_verify_ct": 4}).length == 3.0

    def test_of_a_server_that_does_not_speculate(self) -> None:
        assert of_meta_info({"completion_tokens": 13}) == Acceptance()
        assert Acceptance().length == 0.0

    @given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=5))
    def test_the_rates_sum_to_the_excess_length(self, histograms: list[list[int]]) -> None:
        parts = [Acceptance(sum(h), sum(j * n for j, n in enumerate(h)), tuple(h)) for h in histograms]
        whole = total(parts)
        assert whole.steps == sum(sum(h) for h in histograms)
        if whole.steps:
            assert sum(whole.rates()) == pytest.approx(whole.length - 1)
        assert all(0 <= rate <= 1 for rate in whole.conditional_rates())
        assert whole.rates() == sorted(whole.rates(), reverse=True)

    def test_the_standard_error_is_zero_for_equal_requests_and_unknown_for_one(self) -> None:
        one = Acceptance(10, 15, (5, 0, 0, 5))
        assert standard_error([one, one, one]) == 0
        assert standard_error([one]) == float("inf")


class TestCommand:
    def test_rates_and_verdict(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(accepted=(3, 1, 1))) as server:
            code, said = run_json(capsys, "--url", server.url, "--requests", "6", "--max-tokens", "33", "--expect", "2.6")
        # Each 8 tokens of a request: accepted 3, 1, 1 of three steps; 33 tokens are one of the prefill and four times that.
        assert code == 0
        assert said["length"] == pytest.approx(8 / 3, abs=1e-4)
        assert said["rates"] == pytest.approx([1, 1 / 3, 1 / 3], abs=1e-4)
        assert (said["steps"], said["requests"], said["chat_template"]) == (72, 6, True)
        assert server.sent[0]["input_ids"] == [1, 2, 3]

    def test_too_low_is_a_finding(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(accepted=(1, 0))) as server:
            code, said = run_json(capsys, "--url", server.url, "--max-tokens", "31", "--expect", "2.5")
        assert code == 1
        assert said["verdict"].startswith("too low: 1.50 against 2.50 expected, 2.35 the least")

    def test_hardly_any_needs_no_expectation(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(algorithm="EAGLE", accepted=(0,), old_names=True)) as server:
            code, out, _ = run(capsys, "--url", server.url)
        assert code == 1
        assert "hardly a draft is accepted" in out
        assert "--speculative-algorithm EAGLE" in out

    def test_a_server_without_a_draft(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(algorithm=None)) as server:
            code, out, _ = run(capsys, "--url", server.url)
        assert code == 1
        assert "does not speculate" in out
        assert server.sent == []

    def test_the_score_is_the_expectation(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        score = tmp_path / "score.json"
        score.write_text('{"acceptance_length": 3.5}')
        with serving(StandIn(accepted=(1,))) as server:
            code, said = run_json(capsys, "--url", server.url, "--score", str(score))
        assert (code, said["expected_length"]) == (1, 3.5)

    def test_passive_sends_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        metrics = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_length{tp_rank="1"} 0.0\n'
        with serving(StandIn(mean_length=2.25, metrics=metrics)) as server:
            code, said = run_json(capsys, "--url", server.url, "--passive", "--expect", "2.2")
        assert code == 0
        assert (said["server_mean_length"], said["server_gauge_length"], said["length"]) == (2.25, 2.5, None)
        assert server.sent == []

    def test_plain_text_where_messages_are_not_taken(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(templates=False)) as server:
            _, out, _ = run(capsys, "--url", server.url, "--requests", "2")
        assert "plain text" in out
        assert isinstance(server.sent[0]["text"], str)

    def test_ids_where_there_is_no_tokenizer(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(StandIn(ids_only=True)) as server:
            run(capsys, "--url", server.url, "--requests", "3")
        assert [len(body["input_ids"]) for body in server.sent] == [16, 16, 16]

    def test_an_api_key(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SGLANG_API_KEY", raising=False)
        with serving(StandIn(api_key="k")) as server:
            assert run(capsys, "--url", server.url)[0] == 2
            assert run(capsys, "--url", server.url, "--api-key", "k", "--requests", "1")[0] == 0

    @pytest.mark.parametrize("content", ["", "[1]", '{"text": "a", "input_ids": [1]}', "no json"])
    def test_bad_prompts(self, content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        prompts = tmp_path / "prömpts.jsonl"
        prompts.write_text(content)
        with serving(StandIn()) as server:
            code, _, err = run(capsys, "--url", server.url, "--prompts", str(prompts))
        assert code == 2
        assert "prömpts" in err

    def test_nobody_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run(capsys, "--url", "127.0.0.1:1")
        assert code == 2
        assert "is the server up" in err
