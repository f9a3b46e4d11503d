"""What does not fit is refused before anything changes; what fits is accepted."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import pickle

import pytest
import torch
import torchrl.data as stock
from common import CAPACITY, PER, buffer, handles, ids, leaves, stamps, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
)
from torchrl.data.replay_buffers.generations import (
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations.checkpoints.samplers import (
    dumpable,
    load_sampler_state,
    sampler_state,
)
from torchrl.envs import ObservationNorm


def plain(records=CAPACITY, **kwargs):
    kwargs.setdefault("storage", LazyTensorStorage(CAPACITY))
    rb = TensorDictReplayBuffer(track_generations=True, **kwargs)
    if records:
        rb.extend(ids(range(records)))
    return rb


def best(records=CAPACITY):
    return plain(records, writer=TensorDictMaxValueWriter(rank_key="id", track_generations=True))


def without_replacement():
    rb = plain(sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.sample()
    return rb


def normed():
    return plain(transform=ObservationNorm(1.0, 2.0, in_keys=["id"]))


def generated():
    rb = plain()
    rb.set_rng(torch.Generator().manual_seed(0))
    return rb


def prefetching():
    return td_buffer(prefetch=1, batch_size=2)


def learner():
    rb = td_buffer(sync=False, batch_size=4)
    rb.sample()
    return rb


def ensemble(*members):
    return ReplayBufferEnsemble(*(members or (plain(), plain())), batch_size=4)


def looks(rb):
    """All that a restore could change."""
    members = rb._rbs if isinstance(rb, ReplayBufferEnsemble) else [rb]
    found = []
    for member in members:
        records = member.storage[:]
        with_tree = member._priority_sampler is not None
        found += [
            copy.deepcopy(records) if isinstance(records, list) else records.clone(),
            len(member),
            stamps(member).clone(),
            leaves(member) if with_tree else None,
            member.writer._cursor,
            member.writer._write_count,
            member._batch_size,
            getattr(member.writer, "_current_top_values", None),
            None if member._rng is None else member._rng.get_state().tolist(),
            len(member._prefetch_queue),
            {key: value.tolist() for key, value in member._transform.state_dict().items()},
        ]
    return [entry.tolist() if isinstance(entry, torch.Tensor) else entry for entry in found]


def assert_same(found, before):
    for ours, theirs in zip(found, before, strict=True):
        if isinstance(ours, TensorDict):
            assert (ours == theirs).all()
        elif isinstance(ours, list) and ours and isinstance(ours[0], TensorDict):
            assert all((one == other).all() for one, other in zip(ours, theirs, strict=True))
        else:
            assert ours == theirs


def refused(rb, load, error, match):
    before = looks(rb)
    with pytest.raises(error, match=match):
        load()
    assert_same(looks(rb), before)


# ------------------------------------------------------------------ states


def changed(*path, to=None, drop=False):
    """A change of one entry of a state; ``to`` may be a function of what is there."""

    def change(state):
        *folders, last = path
        for key in folders:
            state = state[key]
        if drop:
            del state[last]
        else:
            state[last] = to(state[last]) if callable(to) else to

    change.__name__ = "-".join(map(str, path)) + ("-dropped" if drop else "")
    return change


def id_of(change):
    return change.__name__


CAPACITIES = "_len must be an integer from 0 to 8"
BAD = [
    (td_buffer, changed("_storage", drop=True), ValueError, "must have '_storage'"),
    (td_buffer, changed("_storage", to=None), TypeError, "storage must be a dict: got NoneType"),
    (td_buffer, changed("_storage", "_storage", drop=True), ValueError, "must have '_storage'"),
    (td_buffer, changed("_storage", "_storage", to=3), TypeError, "must be a tensor or a dict"),
    (td_buffer, changed("_storage", "initialized", drop=True), ValueError, "'initialized'"),
    (td_buffer, changed("_storage", "initialized", to=1), TypeError, "must be a bool: got 1"),
    (td_buffer, changed("_storage", "_len", drop=True), TypeError, "_len .* got None"),
    *(
        (td_buffer, changed("_storage", "_len", to=value), error, match)
        for value, error, match in [
            (99, ValueError, CAPACITIES + ": got 99"),
            (-1, ValueError, CAPACITIES + ": got -1"),
            (True, TypeError, "_len must be an integer: got True"),
            (8.0, TypeError, "_len must be an integer: got 8.0"),
        ]
    ),
    (td_buffer, changed("_storage", "_storage", "id", drop=True), ValueError, "no 'id'"),
    (
        td_buffer,
        changed("_storage", "_storage", "obs", to=torch.zeros(8)),
        ValueError,
        r"got 'obs': \(8,\) of torch.float32, and there no 'obs'",
    ),
    (
        td_buffer,
        changed("_storage", "_storage", "id", to=torch.zeros(8, 2, dtype=torch.int64)),
        ValueError,
        r"got 'id': \(8, 2\) of torch.int64, and there 'id': \(8,\) of torch.int64",
    ),
    (
        td_buffer,
        changed("_storage", "_storage", "id", to=lambda id_: id_.float()),
        ValueError,
        "'id': .* of torch.float32, and there",
    ),
    (
        td_buffer,
        changed("_storage", "_storage", "index", to=lambda index: index[:4]),
        ValueError,
        "must have 1 dimensions of one shape",
    ),
    (
        td_buffer,
        changed("_storage", "_storage", to=torch.zeros(8)),
        ValueError,
        "got None: .8,. of torch.float32, no 'id'.*and there no None",
    ),
    (
        buffer,
        changed("_storage", "_storage", to={"id": torch.zeros(8)}),
        ValueError,
        "got no None, 'id': .*, and there None: .8,. of torch.int64",
    ),
    (td_buffer, changed("_writer", "_cursor", drop=True), ValueError, "must have '_cursor'"),
    *(
        (rb, changed("_writer", "_cursor", to=value), error, match)
        for rb in (td_buffer, best, lambda: td_buffer(storage=ListStorage(CAPACITY)))
        for value, error, match in [
            (99, ValueError, "cursor must be an integer from 0 to 7: got 99"),
            (-3, ValueError, "cursor must be an integer from 0 to 7: got -3"),
            (False, TypeError, "cursor must be an integer: got False"),
            (None, TypeError, "cursor must be an integer: got None"),
        ]
    ),
    (td_buffer, changed("_writer", "_write_count", to=1.5), TypeError, "_write_count"),
    (td_buffer, changed("_writer", "_write_count", to=2**63), ValueError, "_write_count"),
    (td_buffer, changed("_writer", "_lineage", to=3), TypeError, "lineage must be a string"),
    *(
        (td_buffer, changed("_writer", key, to=value), ValueError, match)
        for key in ("_generation", "_live_generation")
        for value, match in [
            (torch.zeros(8, dtype=torch.int32), "int64 of shape .* got torch.int32"),
            (torch.zeros(8, 1, dtype=torch.int64), r"got torch.int64 of shape \(8, 1\)"),
            (torch.zeros(8), "got torch.float32"),
            ([0] * 8, "got .0, 0"),
            (torch.zeros(9, dtype=torch.int64), "has stamps for 9 slots: this buffer has 8"),
            (torch.zeros(7, dtype=torch.int64), "has stamps for 7 slots: this buffer has 8"),
            (torch.full((8,), -2), "stamps must be an integer from -1"),
            (torch.full((8,), 2**62), "stamps must be an integer from -1"),
        ]
    ),
    (td_buffer, changed("_sampler", to=None), TypeError, "sampler must be a dict"),
    (td_buffer, changed("_sampler", "_min_tree", drop=True), ValueError, "have '_min_tree'"),
    (td_buffer, changed("_sampler", "_sum_tree", to=3), TypeError, "must be a SumSegmentTreeFp32"),
    (
        td_buffer,
        changed(
            "_sampler",
            to=lambda _: PrioritizedSampler(CAPACITY, **PER, dtype=torch.float64).state_dict(),
        ),
        TypeError,
        "must be a SumSegmentTreeFp32 .* got SumSegmentTreeFp64",
    ),
    *(
        (td_buffer, changed("_sampler", name, to=value), error, name)
        for name in ("_alpha", "_beta", "_eps")
        for value, error in [("1", TypeError), (-1.0, ValueError), (float("nan"), ValueError)]
    ),
    (td_buffer, changed("_sampler", "_max_priority", to=3.0), TypeError, "_max_priority"),
    (
        td_buffer,
        changed("_sampler", "_max_priority", to=(torch.tensor(float("inf")), torch.tensor(0))),
        ValueError,
        "_max_priority must be finite",
    ),
    (without_replacement, changed("_sampler", to={}), ValueError, "SamplerWithoutReplacement"),
    (
        without_replacement,
        changed("_sampler", to=lambda _: PrioritizedSampler(CAPACITY, **PER).state_dict()),
        ValueError,
        "SamplerWithoutReplacement.*len_storage",
    ),
    (td_buffer, changed("_sampler", "_schema_version", to="x"), TypeError, "_schema_version"),
    (td_buffer, changed("_storage", "_storage", "index", to=3), TypeError, "got int for 'index'"),
    (
        td_buffer,
        changed("_storage", "_storage", "index", to=lambda index: index.float()),
        ValueError,
        "'index': .* of torch.float32, and there",
    ),
    (
        learner,
        changed("_learners", 0, "sampler", "_sum_tree", "tree", to="_min_tree"),
        TypeError,
        "_sum_tree must be a SumSegmentTreeFp32",
    ),
    (
        without_replacement,
        changed("_sampler", "_sample_list", to="x"),
        TypeError,
        "slots still to sample must be int64",
    ),
    (best, changed("_writer", "_rank_key", to=3), TypeError, "rank key must be a string"),
    (without_replacement, changed("_sampler", "len_storage", to=99), ValueError, "len_storage"),
    (
        without_replacement,
        changed("_sampler", "_sample_list", to=torch.tensor([99])),
        ValueError,
        "slots still to sample",
    ),
    (best, changed("_writer", "_current_top_values", drop=True), ValueError, "has no ranks"),
    (best, changed("_writer", "_current_top_values", to=3), TypeError, "list of pairs: got int"),
    (best, changed("_writer", "_current_top_values", to=[(1.0, 99)]), ValueError, "from 0 to 7"),
    (
        best,
        changed("_writer", "_current_top_values", to=[(1, 1), (2, 1)]),
        ValueError,
        "got 1 again",
    ),
    (best, changed("_writer", "_current_top_values", to=[("x", 1)]), TypeError, "must be numbers"),
    (best, changed("_writer", "_current_top_values", to=[1.0]), ValueError, "pairs of rank"),
    (best, changed("_writer", "_rank_key", drop=True), ValueError, "must have '_rank_key'"),
    (best, changed("_writer", "_write_count", drop=True), ValueError, "must have '_write_count'"),
    (td_buffer, changed("_transforms", drop=True), ValueError, "must have '_transforms'"),
    (
        td_buffer,
        changed("_transforms", to={"x": torch.ones(1)}),
        ValueError,
        "transforms must have",
    ),
    (normed, changed("_transforms", to={}), ValueError, "transforms must have"),
    (
        normed,
        changed("_transforms", "transforms.0.loc", to=torch.zeros(3)),
        ValueError,
        r"'transforms.0.loc': \(3,\)",
    ),
    (td_buffer, changed("_batch_size", drop=True), ValueError, "must have '_batch_size'"),
    (td_buffer, changed("_batch_size", to=0), ValueError, "_batch_size .* got 0"),
    (td_buffer, changed("_batch_size", to="4"), TypeError, "_batch_size must be an integer"),
    (td_buffer, changed("_consume_after_n_samples", to=-1), ValueError, "consume_after_n_samples"),
    (generated, changed("_rng", to=(torch.zeros(3), "cpu")), ValueError, "random state"),
    (generated, changed("_rng", to=3), ValueError, "random state"),
    (prefetching, changed("_prefetch_state", "capacity", to=3), RuntimeError, "capacity 3"),
    (prefetching, changed("_prefetch_state", to=3), TypeError, "must be a dictionary"),
    (
        learner,
        changed("_learners", 0, to=3),
        TypeError,
        "_learners must be a list of Mapping or NoneType",
    ),
    (learner, changed("_learners", 0, "sampler", drop=True), ValueError, "must have 'sampler'"),
    (
        learner,
        changed("_learners", 0, "seen", to=torch.zeros(8)),
        ValueError,
        "stamps must be int64",
    ),
    (
        learner,
        changed("_learners", 0, "seen", to=torch.zeros(9, dtype=torch.int64)),
        ValueError,
        "has stamps for 9 slots: this buffer has 8",
    ),
    (
        learner,
        changed("_learners", 0, "sampler", "_sum_tree", drop=True),
        ValueError,
        "no priorities",
    ),
    (
        learner,
        changed("_learners", 0, "sampler", "_sum_tree", "leaves", to=torch.full((8,), torch.nan)),
        ValueError,
        "leaves of the priority tree must be finite .* got nan for slot 0",
    ),
    (
        learner,
        changed("_learners", 0, "sampler", "_min_tree", "leaves", to=torch.zeros(4)),
        ValueError,
        "has priorities for 4 slots: this buffer has 8",
    ),
    (ensemble, changed("_storage", "1", drop=True), ValueError, "has 1 members: .* has 2"),
    (ensemble, changed("_learners", to=[None]), ValueError, "has 1 members: .* has 2"),
    (ensemble, changed("_writer", "1", "_cursor", to=99), ValueError, "cursor .* got 99"),
    (ensemble, changed("_storage", "1", "_len", to=-1), ValueError, CAPACITIES),
    (ensemble, changed("_batch_size", to=-1), ValueError, "_batch_size"),
]


@pytest.mark.parametrize(
    ("make", "change", "error", "match"),
    BAD,
    ids=[f"{i}-{id_of(row[1])}" for i, row in enumerate(BAD)],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_has_changed(make, change, error, match):
    rb = make()
    state = copy.deepcopy(make().state_dict())
    change(state)
    refused(rb, lambda: rb.load_state_dict(state), error, match)


@pytest.mark.parametrize("state", [None, 3, [], {}])
@pytest.mark.parametrize("make", [td_buffer, ensemble])
def test_what_is_no_state_is_refused(make, state):
    rb = make()
    match = "must be a dict: got" if not isinstance(state, dict) else "must have '_storage'"
    refused(rb, lambda: rb.load_state_dict(state), (TypeError, ValueError), match)


LISTS = {"list": ListStorage, "compressed": CompressedListStorage, "tensor": LazyTensorStorage}
KINDS = {
    ("tensor", "list"): "has records in a OrderedDict: a ListStorage loads a list",
    ("tensor", "compressed"): "has records in a OrderedDict: a CompressedListStorage loads a list",
    ("list", "tensor"): "must be a tensor or a dict of tensors: got list",
    ("list", "compressed"): "must have '_metadata'",
    ("compressed", "list"): "has compressed records: this buffer has a ListStorage",
    ("compressed", "tensor"): "must be a tensor or a dict of tensors: got list",
}


@pytest.mark.parametrize(("saved", "into"), KINDS)
def test_records_of_another_kind_of_storage_are_refused(saved, into):
    rb = plain(storage=LISTS[into](CAPACITY))
    state = plain(storage=LISTS[saved](CAPACITY)).state_dict()
    refused(rb, lambda: rb.load_state_dict(state), (TypeError, ValueError), KINDS[saved, into])


def test_an_ensembles_checkpoint_and_one_buffers_are_no_exchange(tmp_path):
    ens, rb = ensemble(), plain()
    ens.dumps(tmp_path / "ensemble")
    rb.dumps(tmp_path / "one")
    is_of = "is of an ensemble"
    refused(rb, lambda: rb.load_state_dict(ens.state_dict()), ValueError, is_of)
    refused(rb, lambda: rb.loads(tmp_path / "ensemble"), ValueError, is_of)
    is_one = "is of one buffer: this is an ensemble"
    refused(ens, lambda: ens.load_state_dict(rb.state_dict()), ValueError, is_one)
    refused(ens, lambda: ens.loads(tmp_path / "one"), ValueError, is_one)


# ------------------------------------------------------------------ dumps


def rewritten(file, **entries):
    """Replaces entries of a JSON file (None: drops them), as if it had been dumped so."""

    def damage(folder):
        content = json.loads((folder / file).read_text())
        content.update(entries)
        dropped = [key for key, value in content.items() if entries.get(key, 0) is None]
        for key in dropped:
            del content[key]
        (folder / file).write_text(json.dumps(content))

    damage.__name__ = f"{file}-{entries}"
    return damage


def overwritten(file, content):
    def damage(folder):
        (folder / file).write_bytes(content)

    damage.__name__ = f"{file}-overwritten"
    return damage


def cut(file, size=3):
    def damage(folder):
        os.truncate(folder / file, size)

    damage.__name__ = f"{file}-cut"
    return damage


def gone(file):
    def damage(folder):
        (folder / file).unlink()

    damage.__name__ = f"{file}-gone"
    return damage


def saved(file, content):
    def damage(folder):
        torch.save(content, folder / file)

    damage.__name__ = f"{file}-saved"
    return damage


def numbers(*values, dtype):
    return torch.tensor(values, dtype=dtype).numpy().tobytes()


def plain_best():
    rb = stock.TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        writer=stock.TensorDictMaxValueWriter(rank_key="id"),
    )
    rb.extend(ids(range(CAPACITY)))
    return rb


NOT_WHOLE = "is not whole"
BAD_DUMPS = [
    (td_buffer, rewritten("writer/metadata.json", cursor=99), ValueError, "cursor .* got 99"),
    (td_buffer, rewritten("writer/metadata.json", cursor=-3), ValueError, "cursor .* got -3"),
    (td_buffer, rewritten("writer/metadata.json", cursor=True), TypeError, "cursor .* got True"),
    (td_buffer, rewritten("writer/metadata.json", cursor=None), ValueError, "must have 'cursor'"),
    (td_buffer, rewritten("writer/metadata.json", write_count="3"), TypeError, "_write_count"),
    (td_buffer, rewritten("writer/metadata.json", lineage=3), TypeError, "lineage"),
    (
        td_buffer,
        rewritten("writer/metadata.json", generation_shape=[16]),
        RuntimeError,
        "generation.memmap .* needs 128 bytes: got 64",
    ),
    (
        td_buffer,
        rewritten("writer/metadata.json", generation_shape=[4]),
        ValueError,
        "has stamps for 4 slots: this buffer has 8",
    ),
    (
        td_buffer,
        rewritten("writer/metadata.json", generation_shape=[4, 2]),
        ValueError,
        r"got torch.int64 of shape \(4, 2\)",
    ),
    (
        td_buffer,
        rewritten("writer/metadata.json", generation_dtype="torch.int32"),
        ValueError,
        "got torch.int32",
    ),
    (
        td_buffer,
        rewritten("writer/metadata.json", generation_dtype="int63"),
        RuntimeError,
        "has no shape and dtype: got .* 'int63'",
    ),
    (
        td_buffer,
        overwritten("writer/generation.memmap", numbers(*[-7] * 8, dtype=torch.int64)),
        ValueError,
        "stamps must be an integer from -1",
    ),
    (td_buffer, overwritten("writer/metadata.json", b"[]"), TypeError, "writer must be a dict"),
    (td_buffer, rewritten("storage/storage_metadata.json", len=99), ValueError, "got 99"),
    (td_buffer, rewritten("storage/storage_metadata.json", len=-1), ValueError, "got -1"),
    (td_buffer, rewritten("storage/storage_metadata.json", len=True), TypeError, "got True"),
    (td_buffer, rewritten("storage/storage_metadata.json", len=None), ValueError, "have 'len'"),
    (
        td_buffer,
        rewritten(
            "storage/storage_metadata.json",
            is_pytree=True,
            metadata={"id": {"shape": [8], "dtype": "torch.int64"}},
        ),
        ValueError,
        "got 0: .8,. of torch.int64, .* and there no 0",
    ),
    (td_buffer, cut("storage/id.memmap"), RuntimeError, "id.memmap .* needs 64 bytes: got 3"),
    (td_buffer, gone("storage/id.memmap"), RuntimeError, "id.memmap .* it is gone"),
    (td_buffer, gone("storage/meta.json"), RuntimeError, "meta.json .* can't be read"),
    (
        td_buffer,
        rewritten("storage/meta.json", id=None),
        ValueError,
        "got no 'id', and there 'id'",
    ),
    (
        td_buffer,
        rewritten(
            "storage/meta.json", id={"dtype": "torch.float64", "shape": [8], "device": "cpu"}
        ),
        ValueError,
        "'id': .* of torch.float64",
    ),
    (
        td_buffer,
        rewritten("storage/meta.json", id={"dtype": "torch.int64", "shape": [-8], "device": "cpu"}),
        RuntimeError,
        "has no shape and dtype",
    ),
    (
        td_buffer,
        rewritten("storage/meta.json", **{"../x": {"dtype": "torch.int64", "shape": [8]}}),
        RuntimeError,
        "must name files inside of .* got '../x.memmap'",
    ),
    (
        td_buffer,
        rewritten("storage/meta.json", **{"/etc": {"type": "TensorDict"}}),
        RuntimeError,
        "must name files inside of .* got '/etc'",
    ),
    (
        buffer,
        rewritten(
            "storage/storage_metadata.json", metadata={".x": {"dtype": "torch.int64", "shape": [8]}}
        ),
        RuntimeError,
        "must name files inside of .* got '/x.memmap'",
    ),
    (
        td_buffer,
        overwritten("sampler/sumtree.memmap", numbers(*[3e38] * 8, dtype=torch.float64)),
        ValueError,
        "must have a sum below 3.403e.38: got 2.4e.39",
    ),
    (
        ensemble,
        saved("generations.pt", {"in_place": True}),
        TypeError,
        "in_place must be a list of bool: got True",
    ),
    (td_buffer, saved("generations.pt", {"in_place": [3]}), TypeError, "in_place must be a list"),
    (td_buffer, saved("generations.pt", {"without": []}), ValueError, "has 0 members"),
    (td_buffer, rewritten("writer/metadata.json", lineage="x"), ValueError, "_lineage does not"),
    (
        td_buffer,
        rewritten("sampler/sampler_metadata.json", _max_priority=[None, 0]),
        TypeError,
        "_max_priority must be a number: got None",
    ),
    (td_buffer, gone("sampler/sampler_metadata.json"), ValueError, "has no priorities"),
    (td_buffer, cut("sampler/sumtree.memmap"), RuntimeError, "sumtree.memmap .* needs 64 bytes"),
    (td_buffer, gone("sampler/mintree.memmap"), RuntimeError, "mintree.memmap .* it is gone"),
    (td_buffer, rewritten("sampler/sampler_metadata.json", _alpha="x"), TypeError, "_alpha"),
    (td_buffer, rewritten("sampler/sampler_metadata.json", _beta=None), ValueError, "_beta"),
    (
        td_buffer,
        rewritten("sampler/sampler_metadata.json", _max_capacity=4),
        ValueError,
        "has priorities for 4 slots: this buffer has 8",
    ),
    (
        td_buffer,
        rewritten("sampler/sampler_metadata.json", _max_priority=[float("inf"), 0]),
        ValueError,
        "_max_priority must be finite",
    ),
    (
        td_buffer,
        overwritten("sampler/sumtree.memmap", numbers(*[-1.0] * 8, dtype=torch.float64)),
        ValueError,
        "leaves of the priority tree .* got -1.0 for slot 0",
    ),
    (without_replacement, cut("sampler/_sample_list.memmap"), RuntimeError, NOT_WHOLE),
    (without_replacement, gone("sampler/meta.json"), ValueError, "SamplerWithoutReplacement"),
    (best, cut("writer/max_value.pt", 40), RuntimeError, "max_value.pt .* can't be read"),
    (best, saved("writer/max_value.pt", {}), ValueError, "has no ranks"),
    (best, saved("writer/max_value.pt", 3), TypeError, "writer must be a dict"),
    (best, rewritten("writer/metadata.json", rank_key=None), ValueError, "has no ranks"),
    (plain_best, cut("writer/current_top_values.memmap"), RuntimeError, NOT_WHOLE),
    (td_buffer, rewritten("buffer_metadata.json", batch_size=0), ValueError, "_batch_size"),
    (td_buffer, rewritten("buffer_metadata.json", batch_size=None), ValueError, "'batch_size'"),
    (normed, cut("transform.t", 50), RuntimeError, "transform.t .* can't be read"),
    (normed, saved("transform.t", {}), ValueError, "transforms must have"),
    (generated, cut("rng_state/rng_state.memmap"), RuntimeError, NOT_WHOLE),
    (prefetching, cut("prefetch.pkl"), RuntimeError, "prefetch.pkl .* can't be read"),
    (
        prefetching,
        overwritten("prefetch.pkl", pickle.dumps({"version": 1, "capacity": 3, "queue": ()})),
        RuntimeError,
        "capacity 3",
    ),
    (learner, cut("generations.pt", 100), RuntimeError, "generations.pt .* can't be read"),
    (learner, saved("generations.pt", 3), TypeError, "own file must be a dict"),
    (
        learner,
        saved("generations.pt", {"learners": [3]}),
        TypeError,
        "_learners must be a list of Mapping or NoneType",
    ),
    (
        learner,
        saved("generations.pt", {"learners": [{"seen": None, "sampler": {}}]}),
        ValueError,
        "has no priorities",
    ),
    (ensemble, rewritten("writer/1/metadata.json", cursor=99), ValueError, "cursor .* got 99"),
    (ensemble, cut("storage/1/id.memmap"), RuntimeError, NOT_WHOLE),
    (ensemble, cut("storage/1_transform.pt"), RuntimeError, "1_transform.pt .* can't be read"),
    (ensemble, gone("storage/0_transform.pt"), RuntimeError, "0_transform.pt .* can't be read"),
    (ensemble, overwritten("storage/metadata.json", b"{}"), ValueError, "have 'empty_members'"),
    (ensemble, overwritten("storage/metadata.json", b"3"), TypeError, "must be a dict: got int"),
    (
        td_buffer,
        overwritten(
            "sampler/sampler_metadata.json",
            b'{"_alpha": 1, "_beta": 1, "_eps": 0, "_max_priority": null, "_max_capacity": 8}',
        ),
        TypeError,
        "_max_priority must be a pair .* got None",
    ),
    (ensemble, cut("generations.pt", 100), RuntimeError, "generations.pt .* can't be read"),
    (
        ensemble,
        saved("generations.pt", {"in_place": [False]}),
        ValueError,
        "has 1 members: this ensemble has 2",
    ),
]


@pytest.mark.parametrize(
    ("make", "damage", "error", "match"),
    BAD_DUMPS,
    ids=[f"{i}-{id_of(row[1])}" for i, row in enumerate(BAD_DUMPS)],
)
def test_a_dump_that_does_not_fit_is_refused_and_nothing_has_changed(
    make, damage, error, match, tmp_path
):
    rb = best() if make is plain_best else make()
    make().dumps(tmp_path / "dump")
    damage(tmp_path / "dump")
    (tmp_path / "dump" / "generations_manifest.json").unlink(missing_ok=True)  # as if it were meant
    files = {file: file.stat().st_size for file in (tmp_path / "dump").rglob("*")}
    refused(rb, lambda: rb.loads(tmp_path / "dump"), error, match)
    assert {file: file.stat().st_size for file in (tmp_path / "dump").rglob("*")} == files


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_our_own_file_of_a_dump_runs_no_code(tmp_path):
    rb = td_buffer()
    rb.dumps(tmp_path / "dump")
    torch.save({"learners": [Evil()]}, tmp_path / "dump" / "generations.pt")
    (tmp_path / "dump" / "generations_manifest.json").unlink()
    refused(
        rb, lambda: rb.loads(tmp_path / "dump"), RuntimeError, "generations.pt .* can't be read"
    )


# ------------------------------------------------------------------ what fits


CHECKPOINTERS = {
    "plain": stock.TensorStorageCheckpointer,
    "flat": stock.FlatStorageCheckpointer,
    "nested": stock.NestedStorageCheckpointer,
    "h5": stock.H5StorageCheckpointer,
}
ENVIRONMENTS = 3


def steps(first, count, ndim):
    """Records of an environment, or ``[environments, count]`` of several."""
    at = torch.arange(first, first + count).unsqueeze(-1)
    if ndim == 2:
        at = torch.stack([at + 1000 * number for number in range(ENVIRONMENTS)])
    done = torch.zeros_like(at, dtype=torch.bool)
    done[..., -1, :] = True
    following = {"obs": at + 1.0, "reward": torch.zeros_like(at).float(), "done": done}
    following |= {"terminated": done, "truncated": torch.zeros_like(done)}
    ends = {key: torch.zeros_like(done) for key in ("done", "terminated", "truncated")}
    return TensorDict({"obs": at.float(), **ends, "next": following}, at.shape[:-1])


@pytest.mark.parametrize("by", ["loads", "load_state_dict"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_each_checkpointer_storage_and_dimension_restores(
    checkpointer, storage, ndim, used, by, tmp_path
):
    if checkpointer == "h5" and importlib.util.find_spec("h5py") is None:
        pytest.skip("needs h5py")

    rows = 10 if ndim == 1 else 4  # TorchRL's hooks trip over memory that was never written

    def made():
        rb = plain(0, storage=storage(10, ndim=ndim), checkpointer=CHECKPOINTERS[checkpointer]())
        if used:
            rb.extend(steps(100, rows, ndim))
        return rb

    rb, target = made(), made()
    rb.extend(steps(0, rows, ndim))
    rb.extend(steps(50, 3, ndim))  # nor do they like a ring that was filled just once
    assert rb.storage.max_size == (10 if ndim == 1 else 12)  # rounded up to whole rows of three
    slots = torch.arange(rows)
    held = {"index": slots, "generation": rb.writer.generations_of(slots)}
    if by == "loads":
        rb.dumps(tmp_path / "dump")
        target.loads(tmp_path / "dump")
    else:
        target.load_state_dict(copy.deepcopy(rb.state_dict()))
    assert target[:]["obs"].tolist() == rb[:]["obs"].tolist()
    assert target.storage.max_size == rb.storage.max_size
    assert len(target) == len(rb)
    # A used buffer has handles of its own, of another lineage.
    assert target._table.is_live(**held).tolist() == [not used] * len(slots)
    target.extend(steps(200, 2, ndim))
    rb.extend(steps(200, 2, ndim))
    assert target[:]["obs"].tolist() == rb[:]["obs"].tolist()


@pytest.mark.parametrize("checkpointer", ["flat", "nested"])
def test_a_key_that_memory_mapped_records_lack_is_refused_before_anything_changes(
    checkpointer, tmp_path
):
    rb, target = (
        plain(0, storage=LazyMemmapStorage(10), checkpointer=CHECKPOINTERS[checkpointer]())
        for _ in range(2)
    )
    rb.extend(steps(0, 3, 1))
    rb.dumps(tmp_path / "dump")
    target.extend(steps(0, 3, 1).exclude("done"))
    refused(target, lambda: target.loads(tmp_path / "dump"), ValueError, "have .'done'. at their")


def test_another_row_or_capacity_of_a_storage_with_cells_is_refused(tmp_path):
    def made(slots, environments):
        rb = plain(0, storage=LazyTensorStorage(slots, ndim=2))
        if environments:
            rb.extend(steps(0, 3, 2)[:environments])
        return rb

    rb = made(10, 3)
    rb.dumps(tmp_path / "dump")
    state = rb.state_dict()
    for other, match in (
        (made(16, 0), "has records for 12 slots: this buffer has 18"),
        (made(10, 2), r"records of shape \(4, 3\): this buffer has \(5, 2\)"),
        (plain(0, storage=LazyTensorStorage(4, ndim=1)), "obs"),
    ):
        for load in (
            lambda other=other: other.load_state_dict(state),
            lambda other=other: other.loads(tmp_path / "dump"),
        ):
            if other.storage.ndim == 1:
                continue
            with pytest.raises(ValueError, match=match):
                load()
            assert len(other) in (0, 6)


@pytest.mark.parametrize("storage", [ListStorage, CompressedListStorage])
def test_lists_restore(storage, tmp_path):
    rb = plain(5, storage=storage(CAPACITY))
    for used in (0, 3):
        target = plain(used, storage=storage(CAPACITY))
        target.load_state_dict(copy.deepcopy(rb.state_dict()))
        assert [int(record["id"]) for record in target.storage[:]] == [0, 1, 2, 3, 4]
    if storage is CompressedListStorage:
        rb.dumps(tmp_path / "dump")
        target = plain(3, storage=storage(CAPACITY))
        target.loads(tmp_path / "dump")
        rb.extend(ids(range(10, 15)))
        rb.dumps(tmp_path / "dump")  # the target has no view of the files
        assert [int(record["id"]) for record in target.storage[:]] == [0, 1, 2, 3, 4]
        copy.deepcopy(target)
    else:
        rb = plain(3, storage=ListStorage(CAPACITY))
        plain().dumps(tmp_path / "dump")
        refused(rb, lambda: rb.loads(tmp_path / "dump"), NotImplementedError, "ListStorage")


def test_plain_tensors_load_into_a_buffer_that_has_some(tmp_path):
    rb, target, new = buffer(), buffer(5), buffer(0)
    rb.dumps(tmp_path / "dump")
    target.loads(tmp_path / "dump")
    assert target[:].tolist() == list(range(8))
    with pytest.raises(RuntimeError, match=r"this buffer has none\. Write one first"):
        new.loads(tmp_path / "dump")
    assert (len(new), stamps(new).tolist()) == (0, [-1] * 8)
    wide = buffer(0)
    wide.extend(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="must have the names, shapes and dtypes of this buffer's"):
        wide.loads(tmp_path / "dump")
    assert len(wide) == 3


def test_torchrls_own_checkpoints_fit_whatever_their_count_of_writes(tmp_path):
    theirs = plain_best()
    theirs.writer._write_count = -(2**31)  # a C int that has wrapped
    theirs.dumps(tmp_path / "dump")
    rb = best(0)
    rb.loads(tmp_path / "dump")
    assert rb[:]["id"].tolist() == list(range(8))
    ring = plain(0)
    ring.loads(tmp_path / "dump")  # a ring writer needs no ranks
    assert ring[:]["id"].tolist() == list(range(8))


def test_a_ring_without_priorities_takes_no_notice_of_those_in_a_checkpoint(tmp_path):
    rb, target = td_buffer(), plain(0)
    rb.dumps(tmp_path / "dump")
    for load in (
        lambda: target.load_state_dict(rb.state_dict()),
        lambda: target.loads(tmp_path / "dump"),
    ):
        load()
        assert target[:]["id"].tolist() == list(range(8))


# ------------------------------------------------------------------ samplers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_of_a_priority_sampler_is_of_tensors_and_comes_back(dtype):
    sampler, other = (PrioritizedSampler(CAPACITY, **PER, dtype=dtype) for _ in range(2))
    sampler.update_priority(torch.arange(5), torch.arange(1, 6, dtype=dtype))
    file = io.BytesIO()
    torch.save(sampler_state(sampler), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert state["_sum_tree"]["leaves"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    load_sampler_state(other, state)
    all_ = torch.arange(CAPACITY)
    assert other._sum_tree[all_].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert other._min_tree[all_].tolist() == sampler._min_tree[all_].tolist()
    assert (other._sum_tree.query(0, CAPACITY), other._min_tree.query(0, CAPACITY)) == (15, 1)
    assert [float(part) for part in other._max_priority] == [5, 4]
    assert state["_sum_tree"]["leaves"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_a_tree_of_one_leaf_comes_back():
    first, second = PrioritizedSampler(1, **PER), PrioritizedSampler(1, **PER)
    first.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    load_sampler_state(second, sampler_state(first))
    assert second._sum_tree.query(0, 1) == 3


class Enveloped(PrioritizedSampler):
    """A user's sampler that saves its state in a form of its own."""

    def state_dict(self):
        return {"envelope": super().state_dict(), "note": "mine"}

    def load_state_dict(self, state_dict):
        self.note = state_dict["note"]
        super().load_state_dict(state_dict["envelope"])


def test_what_a_users_sampler_adds_comes_back_with_its_trees():
    first, second = Enveloped(CAPACITY, **PER), Enveloped(CAPACITY, **PER)
    first.update_priority(torch.arange(3), torch.tensor([3.0, 2.0, 1.0]))
    load_sampler_state(second, sampler_state(first))
    assert second._sum_tree[torch.arange(4)].tolist() == [3, 2, 1, 0]
    assert second.note == "mine"


def test_a_learners_state_is_read_by_torch_load_with_its_defaults(tmp_path):
    rb, fresh = learner(), td_buffer(0, sync=False, batch_size=4)
    rb.update_priority_if_present(**handles(rb), priority=torch.arange(11.0, 19.0))
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    fresh.sample()
    assert leaves(fresh) == list(range(11, 19))


@pytest.mark.parametrize("make", [td_buffer, lambda n=CAPACITY: ensemble(td_buffer(n), plain(n))])
def test_an_emptied_buffer_is_dumped_and_has_no_largest_priority_when_it_is_loaded(make, tmp_path):
    rb, target = make(), make()
    sampler = (rb._rbs[0] if isinstance(rb, ReplayBufferEnsemble) else rb).sampler
    loaded = (target._rbs[0] if isinstance(target, ReplayBufferEnsemble) else target).sampler
    with contextlib.suppress(NotImplementedError):
        rb.empty()
    sampler._empty()
    rb.dumps(tmp_path / "dump")
    assert sampler._max_priority == (None, None)
    target.loads(tmp_path / "dump")
    assert loaded._max_priority == (None, None)


def test_a_dump_that_fails_leaves_no_made_up_priority():
    sampler, uniform = PrioritizedSampler(CAPACITY, **PER), stock.RandomSampler()
    with contextlib.suppress(ZeroDivisionError), dumpable(sampler, uniform, None) as without:
        assert without == [True, False, False]
        assert float(sampler._max_priority[0]) == 1.0
        raise ZeroDivisionError
    assert sampler._max_priority == (None, None)
