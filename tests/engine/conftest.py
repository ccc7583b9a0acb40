"""Real engines: environments, tiny models, and runs that tests share.

An engine run takes most of a minute and one core. So a run is started once, two go at a time, and every test that asks for the
same one reads the same result. `SGLANG_EAGLE3_TEST_RELEASES=0.5.13,0.5.18` runs the tests of other releases than the two of CI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, environments, installing, models
from sglang_eagle3_plugin.rig.engine import EngineResult, EngineSpec
from sglang_eagle3_plugin.rig.environments import Environment

OLDEST, NEWEST = "0.5.9", "0.5.23"
RELEASES = tuple(os.environ.get("SGLANG_EAGLE3_TEST_RELEASES", f"{OLDEST},{NEWEST}").split(","))


@pytest.fixture(scope="session")
def environment() -> Callable[[str], Environment]:
    """Return the environment of a release, with this plugin installed in it."""
    ready: dict[str, Environment] = {}

    def get(release: str) -> Environment:
        if release not in ready:
            ready[release] = environments.ensure(release, print)
            installing.install_plugin(ready[release])
        return ready[release]

    return get


@pytest.fixture(scope="session")
def env059(environment: Callable[[str], Environment]) -> Environment:
    return environment(OLDEST)


@pytest.fixture(scope="session")
def env0523(environment: Callable[[str], Environment]) -> Environment:
    return environment(NEWEST)


class Tiny:
    """Tiny models, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._targets: dict[str, models.Target] = {}

    def target(self, family: str) -> models.Target:
        if family not in self._targets:
            self._targets[family] = models.target(self.root / family / "target", family)
        return self._targets[family]

    def draft(self, family: str, name: str, *args, **kwargs) -> Path:
        """A draft by a name of the caller's choosing; the arguments are those of `models.draft` after the target."""
        path = self.root / family / name
        return path if path.exists() else models.draft(path, self.target(family), *args, **kwargs)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny models ü"))


class Runs:
    """Engine runs by release and spec, each made once, two at a time."""

    def __init__(self, environment: Callable[[str], Environment]) -> None:
        self.environment = environment
        self.pool = ThreadPoolExecutor(max_workers=2)
        self._futures: dict[str, Future[EngineResult]] = {}

    def start(self, release: str, spec: EngineSpec) -> Future[EngineResult]:
        key = f"{release} {spec}"
        if key not in self._futures:
            self._futures[key] = self.pool.submit(engine.run, self.environment(release), spec)
        return self._futures[key]

    def __call__(self, release: str, spec: EngineSpec) -> EngineResult:
        return self.start(release, spec).result()


@pytest.fixture(scope="session")
def runs(environment: Callable[[str], Environment]) -> Iterator[Runs]:
    made = Runs(environment)
    yield made
    made.pool.shutdown(cancel_futures=True)
