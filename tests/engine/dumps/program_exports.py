"""In an environment with torch, SpecForge and speculators: each project's own reader loads our export, bit for bit."""

import contextlib
import os
import sys
from pathlib import Path

import torch
from hidden_states.making import dump, header, sample
from safetensors.torch import load_file
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
from specforge.data.preprocessing import OfflineEagle3Dataset
from specforge.runtime.data_plane.feature_store import load_feature_file
from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices
from speculators.train.data import ArrowDataset, CollateFn

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import torch_io, training
from sglang_eagle3_plugin.hidden_states.export import export
from sglang_eagle3_plugin.hidden_states.layout import SIDECAR, sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump, to_float32

work = Path(sys.argv[1])
head = header(boundaries=(2, 3, 5, 8))  # of 8 layers: three training slots and the final state before the norm
sequences = ([1, 2, 3, 4, 5], [7])
dump(work / "dump", [sample(ids, head) for ids in (*sequences, sequences[0])], head)
(work / "dump" / SIDECAR).write_text(f'{{"key": "{sample_key(sequences[0])}", "mask": [[2, 5]]}}\n')
source = Dump.open(work / "dump")
truth = {tuple(t.input_ids.tolist()): t for t in map(source.read, source.unique())}
assert len(truth) == 2


@contextlib.contextmanager
def refused(part):
    """The block raises a UserError that says ``part``. A release's environment has no pytest."""
    said = None
    try:
        yield
    except UserError as error:
        said = str(error)
    assert said is not None
    assert part in said


def same(tensor, stored):
    return torch.equal(tensor.float(), torch.from_numpy(to_float32(stored)))


# SpecForge: its reader lists and validates, its store loads, its normalizer and collator make a batch.
assert export(source, "specforge", work / "specforge").written == 2
assert export(source, "specforge", work / "specforge").present == 2, "a second run must write nothing"
os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
refs = list(build_offline_reader(str(work / "specforge"), run_id="test", ttt_length=7, max_len=2048))
assert sorted(ref.num_tokens for ref in refs) == [1, 5]
batch = []
for ref in refs:
    raw = load_feature_file(ref.feature_store_uri.removeprefix("file://"))
    expected = truth[tuple(raw["input_ids"].tolist())]
    legacy = OfflineEagle3Dataset.process_data({k: v.clone() for k, v in raw.items()}, 2048)
    normal = build_offline_normalizer(2048)(raw)
    assert all(torch.equal(normal[name], legacy[name]) for name in normal)
    assert same(normal["hidden_state"][0], expected.aux[:, :3].reshape(len(raw["input_ids"]), -1))
    assert same(normal["target"][0], expected.final)
    batch.append(normal)
collated = build_offline_collator()(batch)
assert collated["hidden_state"].shape == (2, 5, 12), collated["hidden_state"].shape
mask = next(n["loss_mask"] for n in batch if n["input_ids"].shape[1] == 5)
assert mask.tolist() == [[0, 0, 1, 1, 0]]  # ours, its last position dropped by SpecForge

# speculators: its own check, and the dataset that its trainer iterates.
export(source, "speculators", work / "speculators")
states = work / "speculators" / "hidden_states"
assert find_corrupt_hidden_state_indices(states, [0, 1]) == {}
dataset = ArrowDataset(max_len=64, datapath=str(work / "speculators"), on_missing="raise")
for index, ids in enumerate(sequences):
    check_hidden_states(load_file(states / f"hs_{index}.safetensors"), ids)
    item = dataset[index]
    expected = truth[tuple(ids)]
    assert same(item["hidden_states"], expected.aux[:, :3].reshape(len(ids), -1))
    assert same(item["verifier_last_hidden_states"], expected.aux[:, 3]), "the last slot is before the norm"
assert dataset[0]["loss_mask"].tolist() == [0, 0, 1, 1, 1]
assert CollateFn(64, 4)([dataset[0], dataset[1]])["hidden_states"].shape == (1, 64, 12)

# The older layout, and all three read back by our own reader.
export(source, "pt", work / "pt")
for name in ("specforge", "speculators", "pt"):
    read = {tuple(s.tokens.tolist()): s for s in training.read(work / name)[1]}
    assert set(read) == set(truth), name
    for ids, states_read in read.items():
        for slot in range(3):
            assert (states_read.slots[f"slot {slot}"] == to_float32(truth[ids].aux[:, slot])).all()

# fp8 exports as the numbers it stands for.
scaled = torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
assert torch_io.to_tensor(scaled, torch.tensor([2.0]).numpy()).tolist() == [[2.0, -4.0]]


class Evil:
    def __reduce__(self):
        return (os.system, (f"touch {work}/run",))


for name in ("evil.ckpt", "evil.pt"):
    torch.save({"aux_hidden_state": Evil()}, work / name)
    with refused("could run code"):
        list(training.read(work / name)[1])
assert not (work / "run").exists()

for bad, needs in (("specforge", header(final="none")), ("speculators", header(boundaries=(2, 3, 5)))):
    dump(work / f"lacking-{bad}", [sample([1], needs)], needs)
    with refused("dump again with"):
        export(Dump.open(work / f"lacking-{bad}"), bad, work / "never")
assert not (work / "never").exists()
