"""Classes that SGLang gives no capture are dumped as well, with a draft and without: each state bears its boundary's label."""

import pytest

from sglang_eagle3_plugin.hidden_states.reader import Dump, to_float32
from sglang_eagle3_plugin.rig import engine, environments, families, installing, models

from .serving import ask, complete

PROMPTS = ((17, 34, 51, 68, 85), (200, 3, 77))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("release", "drafted"), [("0.5.9", False), ("0.5.23", True)])
def test_the_generic_tap_feeds_the_dump(tmp_path, release, drafted):
    environment = environments.ensure(release)
    installing.install_plugin(environment)
    phi = families.family("phi")
    target, draft, variables = families.write(tmp_path, phi, (2, 4, 5), (1, 3, 4))
    dumping = {"EAGLE3_DUMP_DIR": str(tmp_path / "dump"), "EAGLE3_DUMP_MIN_FREE_GB": "0", "EAGLE3_DUMP_BOUNDARIES": "0,3,6"}
    spec = engine.EngineSpec(target, draft if drafted else None, arguments=phi.engine_arguments, environment=variables | dumping)
    with engine.serve(environment, spec) as running:
        # A server with a draft may not see the first request's states before its hooks stand in order: once more then.
        for _ in range(2):
            for prompt in PROMPTS:
                ask(running, [prompt], 2)
        complete(tmp_path / "dump", PROMPTS)
    dump = Dump.open(tmp_path / "dump")
    expected = (2, 4, 5) if drafted else (0, 3, 6)
    assert dump.header().boundaries == expected
    assert {tuple(dump.read(ref).input_ids.tolist()) for ref in dump.refs} >= set(PROMPTS)  # and SGLang's own warm-up
    for ref in dump.refs:
        aux = to_float32(dump.read(ref).aux)
        marked = aux[:, :, models.LABELS : models.LABELS + families.LAYERS] > models.LABEL_SIZE / 2
        assert (marked.sum(axis=-1) == expected).all()
