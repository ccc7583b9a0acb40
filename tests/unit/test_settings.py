"""The environment: what is read, and that a bad value is named and never fatal."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_eagle3_plugin.boundaries import Convention
from sglang_eagle3_plugin.settings import Settings, runtime_directory


def read(**env: str) -> Settings:
    return Settings.from_environment(env)


def test_nothing_set_is_active_and_quiet():
    settings = read()
    assert settings.active
    assert settings.problems == ()
    assert (settings.debug, settings.dump_dir, settings.strict) == (None, None, False)


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_off(value):
    assert not read(EAGLE3_PLUGIN=value).active
    assert read(EAGLE3_PLUGIN=value).why_inactive == "EAGLE3_PLUGIN=0"


def test_wiring_variables():
    settings = read(EAGLE3_LAYER_CONVENTION="Output", EAGLE3_CAPTURE_BOUNDARIES="3, 31,59", EAGLE3_DISABLE_PATCHES="a, b,,")
    assert settings.layer_convention is Convention.OUTPUT
    assert settings.capture_boundaries == (3, 31, 59)
    assert settings.disabled_patches == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EAGLE3_LAYER_CONVENTION", "after"),
        ("EAGLE3_CAPTURE_BOUNDARIES", "3;4"),
        ("EAGLE3_CAPTURE_BOUNDARIES", "-1,2"),
        ("EAGLE3_CAPTURE_BOUNDARIES", "9" * 400),
        ("EAGLE3_STRICT", "2"),
    ],
)
def test_a_bad_value_is_ignored_and_named(name, value):
    settings = read(**{name: value})
    assert len(settings.problems) == 1
    assert name in settings.problems[0]
    assert settings == Settings(problems=settings.problems)


@given(
    st.dictionaries(
        st.sampled_from([f"EAGLE3_{n}" for n in ["PLUGIN", "STRICT", "LAYER_CONVENTION", "CAPTURE_BOUNDARIES", "DEBUG"]]), st.text()
    )
)
def test_never_raises(env):
    Settings.from_environment(env)


def test_where_processes_leave_their_records():
    ours = {"EAGLE3_RUNTIME_DIR": "/ours", "XDG_RUNTIME_DIR": "/run/user/1"}
    assert str(runtime_directory(ours)) == "/ours"
    del ours["EAGLE3_RUNTIME_DIR"]
    assert str(runtime_directory(ours)) == "/run/user/1/sglang-eagle3"
    assert runtime_directory({}).name == f"sglang-eagle3-{os.getuid()}"
