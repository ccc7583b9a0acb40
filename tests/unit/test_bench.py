"""`sglang-eagle3 bench`: the arithmetic, and the command against stand-in servers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin_server import StandIn, serving

from sglang_eagle3_plugin.bench import analyse, plan, report
from sglang_eagle3_plugin.bench.measure import Measurement
from sglang_eagle3_plugin.bench.plan import Setting
from sglang_eagle3_plugin.bench.store import Store
from sglang_eagle3_plugin.cli.main import main
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import generate, prompts
from sglang_eagle3_plugin.server.acceptance import Acceptance
from sglang_eagle3_plugin.server.address import client, parse
from sglang_eagle3_plugin.server.generate import generate_all

CHAIN_1, CHAIN_3 = Setting(1, 1, 2), Setting(1, 3, 4)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def measured(case: str, batch: int, speed: float, step: float, histogram: tuple[int, ...] = (), repeat: int = 0) -> Measurement:
    accepted = Acceptance(sum(histogram), sum(j * n for j, n in enumerate(histogram)), histogram)
    return Measurement(case, batch, repeat, speed, 0.1, step, accepted, ("a", "b"), 1.0, 100)


def store_of(path: Path, *measurements: Measurement) -> Store:
    store = Store(path, {"target": "t"})
    for measurement in measurements:
        store.add(measurement)
    return store


class TestPlan:
    def test_a_chain_verifies_its_steps_and_the_root(self) -> None:
        assert plan.settings([3, 1], [1], [8, 16]) == [CHAIN_1, CHAIN_3]

    def test_a_tree_has_no_more_tokens_than_nodes(self) -> None:
        # Two steps of topk 2: the root, 2, and 4 nodes.
        assert plan.settings([2], [2], [4, 7, 8]) == [Setting(2, 2, 4), Setting(2, 2, 7)]
        with pytest.raises(UserError, match="no tree"):
            plan.settings([2], [2], [8])

    @pytest.mark.parametrize("text", ["", "a", "1,x", "0", "-1,2"])
    def test_bad_lists(self, text: str) -> None:
        with pytest.raises(UserError, match="no list"):
            plan.numbers(text, "--batch")


class TestAnalysis:
    def test_medians_ranges_and_ratios(self, tmp_path: Path) -> None:
        base = [measured("baseline", 1, speed, 0.010, repeat=i) for i, speed in enumerate((100, 90, 110))]
        eagle = [measured(CHAIN_3.name, 1, speed, 0.015, (0, 0, 0, 10), i) for i, speed in enumerate((240, 260, 250))]
        first, second = analyse.rows(store_of(tmp_path, *base, *eagle))
        assert (first.case, first.tokens_per_s, first.ratio) == ("baseline", (100, 90, 110), None)
        assert second.ratio == pytest.approx((2.5, 240 / 110, 260 / 90))
        assert (second.step_cost, second.acceptance.length, second.same_answers) == (1.5, 4.0, 1.0)

    def test_a_draw_within_the_ranges_goes_to_the_baseline(self, tmp_path: Path) -> None:
        base = [measured("baseline", 1, speed, 0.01, repeat=i) for i, speed in enumerate((100, 120))]
        eagle = [measured(CHAIN_3.name, 1, speed, 0.01, (1, 1), i) for i, speed in enumerate((115, 119))]
        assert analyse.best(analyse.rows(store_of(tmp_path, *base, *eagle)), 1).case == "baseline"

    def test_the_fastest_median_does_not_hide_a_slower_one_that_gains_for_certain(self, tmp_path: Path) -> None:
        runs = {"baseline": (90, 95, 100), "wide": (95, 130, 131), "narrow": (110, 111, 112)}
        measurements = [measured(case, 1, speed, 0.01, (1, 1), i) for case, all_ in runs.items() for i, speed in enumerate(all_)]
        assert analyse.best(analyse.rows(store_of(tmp_path, *measurements)), 1).case == "narrow"

    def test_where_it_stops_paying(self, tmp_path: Path) -> None:
        found = analyse.rows(
            store_of(
                tmp_path,
                *(measured("baseline", batch, 100 * batch, 0.01) for batch in (1, 8, 32)),
                *(measured(CHAIN_3.name, batch, speed, 0.02, (1, 1)) for batch, speed in ((1, 200), (8, 780), (32, 2000))),
            )
        )
        assert analyse.stops_paying(found) == 8
        assert analyse.stops_paying([row for row in found if row.batch == 1]) is None

    def test_the_drafts_share_is_the_slope(self, tmp_path: Path) -> None:
        # A step of 10 ms and 2 ms more for each draft step.
        names = {CHAIN_1.name: 0.012, CHAIN_3.name: 0.016}
        found = analyse.rows(store_of(tmp_path, *(measured(name, 1, 100, step, (1, 1)) for name, step in names.items())))
        shares = {row.case: row.draft_share for row in analyse.with_draft_shares(found)}
        assert shares == pytest.approx({CHAIN_1.name: 2 / 12, CHAIN_3.name: 6 / 16})

    def test_the_reasons_for_a_loss(self, tmp_path: Path) -> None:
        store = store_of(
            tmp_path,
            measured("baseline", 1, 100, 0.01),
            measured("poor", 1, 60, 0.02, (90, 5, 5)),
            measured("long", 1, 90, 0.02, (50, 45, 3, 2)),
        )
        poor, long = analyse.rows(store)[1:]
        assert any(
            "acceptance is too low: the first draft is accepted in 10%" in r for r in analyse.why_it_loses(poor, graphs_off=False)
        )
        reasons = analyse.why_it_loses(long, graphs_off=True)
        assert any("from position 2 on" in reason for reason in reasons)
        assert any("graphs are off" in reason for reason in reasons)
        assert reasons[0] == "a step costs 2.00 of the baseline's and yields 1.57 tokens"

    def test_a_loss_whose_steps_would_pay_is_not_laid_on_the_steps(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, measured("baseline", 1, 100, 0.01), measured("slow start", 1, 90, 0.0212, (10, 20, 30)))
        reasons = analyse.why_it_loses(analyse.rows(store)[1], graphs_off=False)
        assert reasons == [
            "a step costs 2.12 of the baseline's and yields 2.33 tokens, a gain by itself: the time is lost outside the steps"
        ]


ABOUT = {"hardware": "h", "date": "d", "target": "t", "draft": "d", "max_tokens": 1, "seed": 0, "command": "c"}


class TestVerdicts:
    """The figures are those of benchmarks/bench.md."""

    def report(self, tmp_path: Path, **speeds: tuple[float, ...]) -> tuple[str, dict[str, Any]]:
        store = Store(tmp_path, {"target": "t"})
        for name, all_ in speeds.items():
            case, batch = name.rsplit("_", 1)
            for repeat, speed in enumerate(all_):
                store.add(measured(case, int(batch), speed, 0.01 if case == "baseline" else 0.03, (20, 10, 10), repeat))
        found = report.findings(store, ABOUT)
        return report.as_markdown(found), report.as_json(found)

    def test_a_ratio_below_1_within_the_ranges_is_no_loss(self, tmp_path: Path) -> None:
        text, said = self.report(
            tmp_path, baseline_1=(492.5, 719.8, 721.3), chain_1=(709.2, 717.9, 718.5), slow_1=(404.1,), fast_1=(788.2, 790.5, 815.4)
        )
        assert "chain: no gain beyond the ranges, and no loss (0.98 to 1.46 of the baseline)." in text
        assert "chain loses" not in text
        assert text.count("more `--repeats` may tell") == 1
        assert "slow loses: a step costs 3.00" in text
        assert [(row["case"], row["verdict"], bool(row["reasons"])) for row in said["rows"]] == [
            ("baseline", None, False),
            ("chain", "within the ranges", False),
            ("slow", "loss", True),
            ("fast", "gain", False),
        ]

    def test_a_larger_median_within_the_ranges_is_not_said_not_to_pay(self, tmp_path: Path) -> None:
        text, said = self.report(
            tmp_path, baseline_4=(2649, 2744), eagle_4=(1582,), baseline_16=(6078, 6348, 6544), eagle_16=(6442, 7920, 7948)
        )
        assert "**No gain beyond the ranges at 4 at once and more.**" in text
        assert "does not pay" not in text
        assert (said["pays"], said["stops_paying_at_batch"]) == (False, 4)

    def test_a_loss_everywhere_is_called_one(self, tmp_path: Path) -> None:
        text, _ = self.report(tmp_path, baseline_1=(100,), eagle_1=(150,), baseline_4=(2649, 2744), eagle_4=(1582,))
        assert "**EAGLE-3 does not pay at 4 at once.**" in text
        assert "may tell" not in text

    def test_two_runs_of_equals_lie_apart_by_chance(self, tmp_path: Path) -> None:
        text, said = self.report(tmp_path, baseline_1=(100, 101), faster_1=(102, 103), slower_1=(96, 97))
        assert [row["verdict"] for row in said["rows"]] == [None, "within the ranges", "within the ranges"]
        assert "Serve it with the baseline" in text
        _, said = self.report(tmp_path / "three", baseline_1=(100, 101, 100), faster_1=(102, 103, 102), slower_1=(96, 97, 96))
        assert [row["verdict"] for row in said["rows"]] == [None, "gain", "loss"]

    def test_a_release_that_tells_no_positions_is_not_said_to_accept_nothing(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, measured("baseline", 1, 100, 0.01))
        told = {}
        for name, accepted in (("good", 200), ("poor", 10)):
            store.add(Measurement(name, 1, 0, 50, 0.1, 0.04, Acceptance(100, accepted), ("a", "b"), 1.0, 100))
            told[name] = " ".join(analyse.why_it_loses(analyse.rows(store)[-1], graphs_off=False))
        assert "acceptance" not in told["good"]
        assert "acceptance is too low: 0.10 drafts are accepted a step" in told["poor"]

    def test_nothing_is_said_of_what_was_not_measured(self, tmp_path: Path) -> None:
        text, _ = self.report(tmp_path, baseline_1=(100,), baseline_4=(200,))
        assert "**No setting of EAGLE-3 was measured at 1 at once and more.**" in text


class TestClient:
    def test_as_many_requests_are_under_way_as_were_asked_for(self) -> None:
        together = threading.Barrier(110, timeout=30)

        class Waits(StandIn):
            def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
                together.wait()
                return super().events(body)

        with serving(Waits()) as server, client(parse(server.url), timeout_s=60) as http:
            answers = generate_all(http, [{"text": "x"}] * 110, at_once=110, max_tokens=4)
        assert len(answers) == 110

    @pytest.mark.parametrize("size", [1, 7, 100, 10_000])
    def test_the_last_event_is_read_however_the_stream_is_cut(self, size: int) -> None:
        events = [b'data: {"text": "' + b"x" * number + b'"}\n\n' for number in range(200)]
        stream = b"".join(events) + b"data: [DONE]\n\n"
        tail, longest = b"", 0
        for start in range(0, len(stream), size):
            tail = generate._last_two(tail + stream[start : start + size])
            longest = max(longest, len(tail))
        assert generate._last_event(tail) == {"text": "x" * 199}
        assert longest < 3 * len(events[-1]) + size

    @pytest.mark.parametrize(
        "line",
        [
            '{"messages": [{"role": "user"}]}',
            '{"messages": "hello"}',
            '{"text": "\\ud800 x"}',
            '{"text": 3}',
            '{"input_ids": [NaN]}',
            '{"input_ids": []}',
        ],
    )
    def test_a_prompt_that_a_server_would_stumble_over_is_named_by_its_line(self, line: str, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"text": "a\u2028b"}\n\n' + line + "\n", encoding="utf-8")
        with pytest.raises(UserError, match="line 3 of"):
            prompts.from_file(path)


class TestStore:
    def test_measurements_survive_and_a_torn_line_does_not(self, tmp_path: Path) -> None:
        one = measured("baseline", 1, 100, 0.01, (1, 2))
        store = store_of(tmp_path, one)
        store.skip("x", 8, "why")
        with store.path.open("ab") as file:
            file.write(b'{"measurement": {"case": "bas')
        store.close()
        again = Store(tmp_path, {"target": "t"})
        assert again.measurements == [one]
        assert again.skipped == {("x", 8): "why"}
        again.add(measured("baseline", 1, 101, 0.01, (), 1))
        again.close()
        assert len(Store(tmp_path, {"target": "t"}).measurements) == 2

    def test_two_runs_at_once_do_not_measure_each_other(self, tmp_path: Path) -> None:
        first = store_of(tmp_path)
        with pytest.raises(UserError, match="another run is writing"):
            Store(tmp_path, {"target": "t"})
        first.close()
        assert Store(tmp_path, {"target": "t"}).measurements == []

    def test_another_runs_directory_is_refused(self, tmp_path: Path) -> None:
        store_of(tmp_path, measured("baseline", 1, 100, 0.01)).close()
        with pytest.raises(UserError, match="differs in target"):
            Store(tmp_path, {"target": "other"})

    def test_a_run_that_measured_nothing_is_begun_anew(self, tmp_path: Path) -> None:
        store_of(tmp_path).close()
        Store(tmp_path, {"target": "other"}).close()
        store_of(tmp_path, measured("baseline", 1, 100, 0.01)).close()
        with pytest.raises(UserError, match="differs in target"):
            Store(tmp_path, {"target": "other"})

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("measurements.jsonl", '{"mine": [1,2,3]}'),
            ("measurements.jsonl", '{"mine": [1,2,3]}\n'),
            ("measurements.jsonl", '{"identity": []}\n'),
            ("report.md", "mine"),
        ],
    )
    def test_what_is_not_its_own_is_left_alone(self, name: str, text: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="give --out another directory"):
            Store(tmp_path, {"target": "t"})
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, text)]


class TestCommand:
    def arguments(self, out: Path, *extra: str) -> list[str]:
        return ["--out", str(out), "--requests", "2", "--max-tokens", "25", "--repeats", "2", "--batch", "1,2", *extra]

    def test_two_running_servers(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        out = tmp_path / "größe"
        with (
            serving(StandIn(algorithm=None, step_s=0.01)) as plain,
            serving(StandIn(accepted=(3,), step_s=0.012)) as eagle,
        ):
            urls = ["--baseline-url", plain.url, "--eagle-url", eagle.url]
            code, text, _ = run(capsys, *self.arguments(out, *urls))
            asked = len(eagle.sent)
            again, _, _ = run(capsys, *self.arguments(out, *urls))
        assert (code, again) == (0, 0)
        assert "× baseline" in text
        assert len(eagle.sent) == asked, "the second run measures nothing again"
        assert eagle.flushed == 4
        said = json.loads((out / "report.json").read_text())
        row = next(row for row in said["rows"] if row["case"] == "eagle3" and row["batch"] == 1)
        assert row["ratio"][0] > 2
        assert row["acceptance_length"] == 4
        assert row["same_answers"] == 1
        assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "report.md").read_text() + "\n" == text

    def test_a_loss_is_a_finding_with_its_reasons(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with (
            serving(StandIn(algorithm=None, step_s=0.005)) as plain,
            serving(StandIn(accepted=(0, 0, 0, 1), step_s=0.015)) as eagle,
        ):
            code, text, err = run(capsys, *self.arguments(tmp_path, "--baseline-url", plain.url, "--eagle-url", eagle.url))
        assert code == 1
        assert "acceptance is too low" in text
        assert "EAGLE-3 does not pay at 1 at once" in text
        assert "eagle3, batch 2: left out" in err

    def test_servers_that_are_not_what_they_are_given_for(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with serving(StandIn(algorithm=None)) as plain, serving(StandIn()) as eagle:
            for number, (base, other, told) in enumerate(
                (
                    (eagle, plain, "baseline: its server at"),
                    (plain, plain, "does not speculate"),
                    (eagle, eagle, "speculates (EAGLE3)"),
                )
            ):
                out = tmp_path / str(number)
                code, _, err = run(capsys, *self.arguments(out, "--baseline-url", base.url, "--eagle-url", other.url))
                assert (code, "give the baseline's server without a draft" in err) == (2, True)
                assert told in err

    def test_servers_that_template_messages_otherwise(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with serving(StandIn(algorithm=None, templates=False)) as plain, serving(StandIn()) as eagle:
            urls = ["--baseline-url", plain.url, "--eagle-url", eagle.url]
            run(capsys, *self.arguments(tmp_path, *urls))
            plain.templates = True  # and on another day, with another date in the template
            code, _, _ = run(capsys, *self.arguments(tmp_path, *urls, "--repeats", "3"))
        assert code != 2
        texts = [{body.get("text") for body in server.sent} for server in (plain, eagle)]
        assert texts[0] == texts[1] != {None}

    def test_a_batch_size_is_added_to_a_server_without_a_tokenizer(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with serving(StandIn(algorithm=None, ids_only=True)) as plain, serving(StandIn(ids_only=True)) as eagle:
            urls = ["--baseline-url", plain.url, "--eagle-url", eagle.url]
            run(capsys, *self.arguments(tmp_path, *urls))
            assert run(capsys, *self.arguments(tmp_path, *urls, "--batch", "1,2,4"))[0] != 2
            assert len({tuple(body["input_ids"]) for body in eagle.sent}) == 8

    def test_measurements_of_another_server_are_not_gone_on_with(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with serving(StandIn(algorithm=None)) as plain, serving(StandIn()) as eagle:
            urls = ["--baseline-url", plain.url, "--eagle-url", eagle.url]
            assert run(capsys, *self.arguments(tmp_path, *urls))[0] != 2
            eagle.num_steps = 5
            code, _, err = run(capsys, *self.arguments(tmp_path, *urls, "--repeats", "3"))
            assert code == 2
            assert "num_steps 5, was 3" in err
            code, _, err = run(capsys, *self.arguments(tmp_path, "--baseline-url", plain.url, "--eagle-url", "127.0.0.1:1"))
        assert code == 2
        assert "differs in" in err

    def test_a_draft_trained_since_is_another(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, *self.sweep(tmp_path))
        (tmp_path / "draft" / "model.safetensors").write_bytes(b"trained again")
        code, _, err = run(capsys, *self.sweep(tmp_path))
        assert code == 2
        assert "differs in draft's files" in err

    def test_a_setting_whose_server_dies_does_not_keep_the_others_from_being_measured(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        _, text, err = run(capsys, *self.sweep(tmp_path, dies_under_load_with_steps=1))
        assert "steps 1, topk 1, tokens 2, batch 1: left out, its server failed" in err
        assert "steps1-topk1-tokens2.log" in err
        assert "| steps 3, topk 1, tokens 4 |" in text
        # What failed once may not fail again: it is tried, and the others are not measured anew.
        started = len(self.started(tmp_path))
        _, text, _ = run(capsys, *self.sweep(tmp_path))
        assert len(self.started(tmp_path)) == started + 1
        assert "| steps 1, topk 1, tokens 2 |" in text
        assert "Left out" not in text

    def test_a_hopeless_setting_is_not_measured_again(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, *self.sweep(tmp_path, accepted="(1, 0)", slower=0.02))
        started = len(self.started(tmp_path))
        _, text, _ = run(capsys, *self.sweep(tmp_path, accepted="(1, 0)", slower=0.02), "--batch", "1,2,3")
        assert len(self.started(tmp_path)) == started + 1, "the baseline's alone"
        assert "3 at once: at batch 1 it reached" in text

    def test_flags_are_told_of_a_setting_of_an_earlier_call(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, *self.sweep(tmp_path))
        _, text, _ = run(capsys, *self.sweep(tmp_path), "--num-steps", "1")
        assert "Serve it with `--speculative-algorithm EAGLE3 --speculative-num-steps 3" in text

    def test_a_key_of_the_servers_own_is_sent_and_not_written_down(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, _, err = run(capsys, *self.sweep(tmp_path, api_key="s3cret"), "--", "--api-key", "s3cret")
        assert (code, err.count("401")) == (0, 0)
        assert not [path for path in (tmp_path / "out").glob("*.*") if b"s3cret" in path.read_bytes()]

    def test_servers_are_started_for_each_setting(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, text, _ = run(capsys, *self.sweep(tmp_path), "--", "--tp", "2")
        started = self.started(tmp_path)
        assert len(started) == 3
        assert all("--tp 2" in line for line in started)
        assert "--speculative-num-steps" not in started[0]
        assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in started[2]
        assert code == 0
        assert "Serve it with `--speculative-algorithm EAGLE3 --speculative-num-steps 3" in text

    def test_a_longer_chain_is_left_out_when_the_shorter_ones_end_is_useless(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        _, text, _ = run(capsys, *self.sweep(tmp_path, accepted="(0,)"))
        assert len(self.started(tmp_path)) == 2
        assert "Left out" in text

    def test_a_setting_that_does_not_start_is_left_out_with_the_reason(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        _, text, _ = run(capsys, *self.sweep(tmp_path, dies_with_steps=3))
        assert "RuntimeError: no memory left for the draft" in text

    @pytest.mark.parametrize(
        "argv",
        [
            [],
            ["--target", "."],
            ["--baseline-url", "http://h:1"],
            ["--target", "/nowhere", "--draft", "."],
            ["--target", ".", "--draft", ".", "--batch", "0"],
            ["--baseline-url", "h:1", "--eagle-url", "h:2", "--sweep"],
            ["--target", ".", "--draft", ".", "--python", "/nowhere/python"],
        ],
    )
    def test_bad_input(self, argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, _, err = run(capsys, *argv, "--out", str(tmp_path / "out"))
        assert code == 2
        assert "Traceback" not in err

    def started(self, tmp_path: Path) -> list[str]:
        """The command lines of the servers that a sweep has started."""
        return (tmp_path / "argv.txt").read_text().splitlines()

    def sweep(self, tmp_path: Path, **behaviour: Any) -> list[str]:
        for name in ("target", "draft"):
            (tmp_path / name).mkdir(exist_ok=True)
        python = standin_python(tmp_path, tmp_path / "argv.txt", **behaviour)
        models = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
        return [*self.arguments(tmp_path / "out"), *models, "--python", str(python), "--num-steps", "1,3"]


def standin_python(
    tmp_path: Path,
    argv: Path,
    accepted: str = "(steps,)",
    dies_with_steps: int = 0,
    dies_under_load_with_steps: int = 0,
    slower: float = 0.0,
    api_key: str | None = None,
) -> Path:
    """An executable in an interpreter's place: `-m sglang.launch_server ...` starts a stand-in server."""
    program = tmp_path / "launch_standin.py"
    program.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import standin_server
with open({str(argv)!r}, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
def flag(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
steps = int(flag("--speculative-num-steps", 0))
if steps and steps == {dies_with_steps}:
    raise RuntimeError("no memory left for the draft")
port = int(flag("--port"))
algorithm, step_s = "EAGLE3" if steps else None, 0.004 + 0.0005 * steps + {slower} * bool(steps)
class Server(standin_server.StandIn):
    def events(self, body):
        if steps and steps == {dies_under_load_with_steps}:
            os._exit(1)
        yield from super().events(body)
with standin_server.serving(Server(algorithm, steps, {accepted}, step_s, api_key={api_key!r}), port):
    time.sleep(600)
"""
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    python.chmod(0o755)
    return python
