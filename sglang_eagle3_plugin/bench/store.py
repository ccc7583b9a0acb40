"""What has been measured, one JSON line each, so that a run that was broken off goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.bench.measure import Measurement
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import Alone


class Store:
    """An append-only file in the run's directory. Its first line says what the run is."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """Open it, or begin it.

        Args:
            directory: created where it does not exist.
            identity: what must be the same for measurements to be comparable; JSON values.

        Raises:
            UserError: it belongs to another run, or cannot be written.
        """
        self.path = directory / "measurements.jsonl"
        self.measurements: list[Measurement] = []
        self.skipped: dict[tuple[str, int], str] = {}
        self.servers: dict[str, dict[str, Any]] = {}
        self.prompts: list[Any] | None = None
        """What messages became in the baseline's chat template: the same for every server, and on another day."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._alone = Alone(directory)  # two at once would measure each other
            self._read(dict(identity))
        except OSError as error:
            raise UserError(f"{directory} cannot be written ({error.strerror}); give --out another directory") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path} is no file of this command ({error}); give --out another directory") from error

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement, on disk before this returns."""
        self.measurements.append(measurement)
        self._write({"measurement": measurement.as_json()})

    def skip(self, case: str, batch: int, why: str, *, for_good: bool = True) -> None:
        """Note that a case was not measured at a batch size, and why.

        Args:
            case: the case.
            batch: requests at once.
            why: for the report.
            for_good: it is no use to try again; a server that failed may do better the next time.
        """
        self.skipped[case, batch] = why
        if for_good:
            self._write({"skip": [case, batch, why]})

    def server(self, case: str, said: Mapping[str, Any]) -> None:
        """Keep what a case's server said of itself.

        Raises:
            UserError: what was measured of the case before was another server's.
        """
        before = self.servers.get(case, {})
        differing = sorted(key for key in before.keys() & said.keys() if before[key] != said[key] and key != "mean_length")
        if differing and any(measurement.case == case for measurement in self.measurements):
            how = "; ".join(f"{key} {said[key]!r}, was {before[key]!r}" for key in differing)
            raise UserError(
                f"{case}: this is not the server that {self.path} holds measurements of ({how}); give --out another directory"
            )
        self.servers[case] = dict(said)
        self._write({"server": [case, dict(said)]})

    def keep_prompts(self, prompts: list[Any]) -> None:
        """Keep what is sent to every server from now on."""
        self.prompts = prompts
        self._write({"prompts": prompts})

    def of(self, case: str, batch: int) -> list[Measurement]:
        """The measurements of a case at a batch size, in the order of their repeats."""
        return sorted((m for m in self.measurements if m.case == case and m.batch == batch), key=lambda m: m.repeat)

    def close(self) -> None:
        """Let another run have the directory."""
        self._alone.close()

    def _take(self, line: dict[str, Any]) -> None:
        if "measurement" in line:
            self.measurements.append(Measurement.from_json(line["measurement"]))
        elif "skip" in line:
            case, batch, why = line["skip"]
            self.skipped[case, batch] = why
        elif "prompts" in line:
            self.prompts = line["prompts"]
        elif "server" in line:
            case, said = line["server"]
            self.servers[case] = said

    def _read(self, identity: dict[str, Any]) -> None:
        """Take what the file holds, or begin it; nothing is changed in a file or directory of somebody else's."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not data.startswith(b'{"identity": {'[: len(data)]):
            raise ValueError("its first line names no run")
        if not data and (others := sorted(path.name for path in self.path.parent.glob("report.*"))):
            told = f"{', '.join(others)} and no {self.path.name} that says whose it is"
            raise UserError(f"{self.path.parent} holds {told}; give --out another directory")
        # A last line that was torn off was never reported.
        whole = data[: data.rfind(b"\n") + 1]
        first, *rest = [json.loads(line) for line in whole.decode().splitlines()] or [{"identity": {}}]
        if any("measurement" in line for line in rest):
            self._check(first["identity"], identity)
            for line in rest:
                self._take(line)
            os.truncate(self.path, len(whole))
            return
        # Nothing was measured: there is nothing to lose, and the reason may have been the flags.
        with self.path.open("wb"):
            self._write({"identity": identity})

    def _check(self, before: dict[str, Any], identity: dict[str, Any]) -> None:
        differing = sorted(key for key in before.keys() | identity.keys() if before.get(key) != identity.get(key))
        if differing:
            how = f"it differs in {', '.join(differing)}"
            raise UserError(f"{self.path.parent} holds another run ({how}); give --out another directory, or the same flags")

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
