"""Servers of the rig that dump, and their dumps."""

import time

import httpx

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.rig import engine, environments, installing, models


def served(tmp_path, release, draft=None, arguments=None, change=None, **variables):
    """A target and a server of it that is yet to be entered; ``change`` may rewrite the checkpoint."""
    environment = environments.ensure(release)
    installing.install_plugin(environment)
    target = models.target(tmp_path / "target")
    if change:
        change(target.path)
    spec = engine.EngineSpec(
        target.path,
        draft=draft and models.draft(tmp_path / "draft", target, draft, convention="output"),
        arguments=arguments or {},
        environment={"EAGLE3_DUMP_MIN_FREE_GB": "0", **variables},
    )
    return target, engine.serve(environment, spec)


def ask(running, prompts, max_new_tokens=1, **more):
    """POST /generate, with what else is to be said; SGLang's outputs, one a prompt."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(f"{running.url}/generate", json={"input_ids": prompts, "sampling_params": sampling} | more, timeout=300)
    answer.raise_for_status()
    return answer.json()


def complete(directory, sequences, times=1, seconds=60):
    """The dump, once every sequence has been acknowledged so many times."""
    keys = [sample_key(ids) for ids in sequences]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if directory.exists() and list(directory.glob("manifest-*")):
            there = [ref.key for ref in Dump.open(directory).refs]
            if all(there.count(key) >= times for key in keys):
                break
        time.sleep(0.2)
    return Dump.open(directory)
