"""Ensembles: a late priority finds its member, and there its own record or none."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import threading
import time

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, Thread, buffer, ids, leaves, stamps, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
)
from torchrl.data.replay_buffers import SamplerEnsemble, StorageEnsemble
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SlotGenerations,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from torchrl.data.replay_buffers.generations.processes.lock import StorageLock
from torchrl.envs.transforms import ExcludeTransform, RenameTransform


def members(count=2, make=td_buffer, **kwargs):
    return [make(**kwargs) for _ in range(count)]


def ensemble(*rbs, **kwargs):
    rbs = rbs or members()
    kwargs.setdefault("batch_size", 4 * len(rbs))
    return ReplayBufferEnsemble(*rbs, **kwargs)


def index_of(buffer_ids, slots):
    buffer_ids, slots = torch.as_tensor(buffer_ids), torch.as_tensor(slots)
    return TensorDict({"buffer_ids": buffer_ids, "index": slots}, buffer_ids.shape)


def all_handles(ens):
    """The current handles of all slots of all members: index and generation, row by row."""
    index = index_of(
        torch.arange(len(ens._rbs)).repeat_interleave(CAPACITY),
        torch.arange(CAPACITY).repeat(len(ens._rbs)),
    )
    return {"index": index, "generation": ens.writer.generations_of(index)}


def lap(rb):
    rb.extend(ids(range(CAPACITY)))


# ------------------------------------------------------------------ updates


@pytest.mark.parametrize("make", [td_buffer, buffer])
def test_each_priority_reaches_its_member_and_there_its_own_record_or_none(make):
    rbs = [make(6, storage=LazyTensorStorage(6)) for _ in range(2)]
    rbs[1].writer.write_at(0, ids([9])[0] if make is td_buffer else torch.tensor(9))
    ens = ensemble(*rbs)
    result = ens.update_priority_if_present(
        index=index_of([0, 1, 1, 0, 1], [0, 0, 0, 5, 5]),
        generation=torch.tensor([0, 0, 1, 0, 0]),
        priority=torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0]),
    )
    assert result.updated_mask.tolist() == [True, False, True, True, True]
    assert (result.num_updated, result.num_stale) == (4, 1)
    assert leaves(rbs[0]) == [10, 1, 1, 1, 1, 40]
    assert leaves(rbs[1]) == [30, 1, 1, 1, 1, 50]


@pytest.mark.parametrize(
    "how",
    [
        {"sample_from_all": True},
        {"p": [0.0, 1.0]},
        {"p": "sampleable"},
        {"num_buffer_sampled": 1},
        {"num_buffer_sampled": 4},
        {},
    ],
)
def test_a_sample_updates_its_live_records_in_its_own_shape(how):
    ens = ensemble(**how)
    sample = ens.sample()
    assert sample["index_generation"].shape == sample.shape
    lap(ens[1])
    sample["td_error"] = torch.arange(2.0, 10.0).reshape(sample.shape)
    result = ens.update_tensordict_priority_if_present(sample)
    from_first = sample["index", "buffer_ids"] == 0
    assert result.updated_mask.shape == sample.shape
    assert result.updated_mask.equal(from_first)
    expected = [1.0] * CAPACITY
    for slot, priority in zip(
        sample["index", "index"][from_first], sample["td_error"][from_first], strict=True
    ):
        expected[slot] = float(priority)
    assert leaves(ens[0]) == expected
    assert leaves(ens[1]) == [1] * CAPACITY


def test_a_sample_that_is_no_tensordict_names_its_member_once_per_block():
    ens = ensemble(*members(make=buffer), sample_from_all=True)
    _, info = ens.sample(return_info=True)
    assert info["index", "buffer_ids"].shape == (2,)
    ens[0].extend(torch.arange(CAPACITY))
    result = ens.update_priority_if_present(
        index=info["index"],
        generation=info["index_generation"],
        priority=torch.full((2, 4), 7.0),
    )
    assert result.updated_mask.tolist() == [[False] * 4, [True] * 4]
    assert leaves(ens[0]) == [1] * 8
    assert {leaves(ens[1])[slot] for slot in info["index", "index"][1]} == {7.0}


def test_handles_of_any_shape_give_a_mask_of_that_shape():
    ens = ensemble()
    one = index_of(1, 3)
    result = ens.update_priority_if_present(index=one, generation=0, priority=5.0)
    assert result.updated_mask.shape == ()
    assert bool(result.updated_mask)
    cube = index_of(torch.ones(2, 1, 3, dtype=torch.int64), torch.arange(6).reshape(2, 1, 3))
    result = ens.update_priority_if_present(
        index=cube, generation=torch.zeros(2, 1, 3, dtype=torch.int32), priority=[[[2, 3, 4]]] * 2
    )
    assert result.updated_mask.tolist() == [[[True] * 3]] * 2
    assert leaves(ens[1]) == [2, 3, 4, 2, 3, 4, 1, 1]
    none = index_of(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    result = ens.update_priority_if_present(index=none, generation=[], priority=[])
    assert result.updated_mask.shape == (0,)
    assert ens.writer.generations_of(none).shape == (0,)


def test_trailing_dimensions_of_priorities_are_reduced_and_one_goes_to_all():
    ens = ensemble()
    index = index_of([0, 1], [2, 2])
    priority = torch.tensor([[1.0, 5.0], [7.0, 2.0]])
    assert ens.update_priority_if_present(
        index=index, generation=[0, 0], priority=priority
    ).updated_mask.all()
    assert (leaves(ens[0])[2], leaves(ens[1])[2]) == (5, 7)
    ens.update_priority_if_present(index=index, generation=[0, 0], priority=3)
    assert (leaves(ens[0])[2], leaves(ens[1])[2]) == (3, 3)


def test_slots_out_of_range_and_stamps_of_minus_one_are_stale():
    ens = ensemble()
    index = index_of([0, 0, 1, 1], [-1, 99, 0, 1])
    assert ens.writer.generations_of(index).tolist() == [-1, -1, 0, 0]
    result = ens.update_priority_if_present(index=index, generation=[0, 0, -1, 0], priority=4.0)
    assert result.updated_mask.tolist() == [False, False, False, True]


def test_without_a_priority_in_the_sample_the_members_default_is_written():
    ens = ensemble(sample_from_all=True)
    ens[1].update_priority_if_present(index=[0], generation=[0], priority=9.0)
    sample = ens.sample()
    assert ens.update_tensordict_priority_if_present(sample).updated_mask.all()
    for member, default in ((0, 1.0), (1, 9.0)):
        slots = sample["index", "index"][member]
        assert {leaves(ens[member])[slot] for slot in slots} == {default}


def test_each_members_own_priority_key_counts():
    other = td_buffer(priority_key="loss")
    ens = ensemble(td_buffer(), other, sample_from_all=True)
    sample = ens.sample()
    sample["td_error"], sample["loss"] = torch.full((2, 4), 2.0), torch.full((2, 4), 3.0)
    ens.update_tensordict_priority_if_present(sample)
    assert max(leaves(ens[0])) == 2
    assert max(leaves(other)) == 3


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_a_priority_that_one_member_must_refuse_is_written_in_none(bad):
    ens = ensemble()
    for rb in ens._rbs:
        before = leaves(rb)
        with pytest.raises(
            ValueError,
            match=r"priority\[1\] must be finite.* got .*handles of member 1, which are rows "
            r"\[1, 3\] of the call",
        ):
            ens.update_priority_if_present(
                index=index_of([0, 1, 0, 1], [0, 1, 2, 3]),
                generation=[0] * 4,
                priority=[5.0, 6.0, 7.0, bad],
            )
        assert leaves(rb) == before


@pytest.mark.parametrize(
    ("index", "generation", "priority", "error", "says"),
    [
        (torch.tensor([0]), [0], 1.0, TypeError, '"buffer_ids" and "index".*got Tensor'),
        (TensorDict({"index": torch.tensor([0])}), [0], 1.0, TypeError, "got .'index'"),
        (index_of([True], [0]), [0], 1.0, TypeError, "buffer_ids must be integer"),
        (index_of([0], [0.5]), [0], 1.0, TypeError, "index must be integer"),
        (index_of([2], [0]), [0], 1.0, ValueError, "buffer_ids from 0 to 1: got 2"),
        (index_of([-1], [0]), [0], 1.0, ValueError, "buffer_ids from 0 to 1: got -1"),
        (index_of([0, 1], [0, 1]), [0], 1.0, ValueError, "one generation per record"),
        (index_of([0, 1], [0, 1]), 0, 1.0, ValueError, "one generation per record"),
        (index_of([0, 1], [0, 1]), [[0], [0], [0]], 1.0, ValueError, "one generation per record"),
        (index_of([0, 1], [0, 1]), [0, 0.5], 1.0, TypeError, "generation must be integer"),
        (index_of([0, 1], [0, 1]), [0, 0], [1.0, 2.0, 3.0], ValueError, "one priority per record"),
        (index_of([0, 1], [0, 1]), [0, 0], "high", TypeError, "priority must be numbers"),
    ],
)
def test_what_is_no_handle_is_refused_by_name(index, generation, priority, error, says):
    ens = ensemble()
    with pytest.raises(error, match=says):
        ens.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert leaves(ens[0]) == leaves(ens[1]) == [1] * 8


def test_stamps_and_slots_must_have_the_shape_of_the_members_numbers():
    index = TensorDict({"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([0, 1, 2])}, [])
    ens = ensemble()
    for call in (
        lambda: ens.writer.generations_of(index),
        lambda: ens.update_priority_if_present(index=index, generation=[0] * 3, priority=1.0),
    ):
        with pytest.raises(
            ValueError, match=r"buffer_ids of shape \(2,\) for index of shape \(3,\)"
        ):
            call()


def test_a_member_that_does_not_track_is_named_and_samples_carry_no_stamps():
    plain = TensorDictPrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CAPACITY))
    lap(plain)
    ens = ensemble(td_buffer(), plain)
    sample = ens.sample()
    assert "index_generation" not in sample.keys()  # noqa: SIM118
    for call in (
        lambda: ens.update_tensordict_priority_if_present(sample),
        lambda: ens.update_priority_if_present(
            index=sample["index"], generation=sample["index", "index"], priority=1.0
        ),
        lambda: ens.extend(sample, return_generation=True),
        lambda: ens.add(sample[0, 0], return_generation=True),
    ):
        with pytest.raises(RuntimeError, match=r"number 1 \(TensorDictPrioritizedReplayBuffer\)"):
            call()


def test_only_members_that_are_named_need_priorities():
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
    lap(uniform)
    ens = ensemble(td_buffer(), uniform)
    assert ens.update_priority_if_present(
        index=index_of([0], [0]), generation=[0], priority=2.0
    ).num_updated
    with pytest.raises(RuntimeError, match=r"member 1: .*needs priorities: got a RandomSampler"):
        ens.update_priority_if_present(
            index=index_of([0, 1], [0, 0]), generation=[0, 0], priority=3.0
        )
    assert leaves(ens[0])[0] == 2


def test_samples_without_stamps_or_of_other_kinds_are_refused():
    ens = ensemble(sample_from_all=True)
    sample = ens.sample()
    for key in ("index", "index_generation"):
        with pytest.raises(KeyError, match=f"needs '{key}' in the sample"):
            ens.update_tensordict_priority_if_present(sample.exclude(key))
    with pytest.raises(TypeError, match="needs a tensordict: got dict"):
        ens.update_tensordict_priority_if_present({})
    sample["td_error"] = torch.ones(2, 4)
    rows = sample.select("index", "index_generation").reshape(-1)
    rows["td_error"] = torch.ones(8)
    assert ens.update_tensordict_priority_if_present(rows).updated_mask.shape == (8,)
    plain = ensemble(*members(make=buffer))
    with pytest.raises(RuntimeError, match="member 0 is a PrioritizedReplayBuffer"):
        plain.update_tensordict_priority_if_present(sample)


def test_of_a_member_that_stands_in_it_twice_the_last_row_wins():
    rb = td_buffer()
    ens = ensemble(rb, rb)
    assert ens.update_priority_if_present(
        index=index_of([1, 0, 1], [3, 3, 4]), generation=[0] * 3, priority=[5.0, 6.0, 7.0]
    ).updated_mask.all()
    assert leaves(rb)[3:5] == [6, 7]


# ------------------------------------------------------------------ construction and parts


def test_other_buffers_and_ensembles_are_refused_as_members():
    stock = torchrl.data.TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(TypeError, match=r"member 1 is a torchrl\..*TensorDictReplayBuffer\. Build"):
        ensemble(td_buffer(), stock)
    with pytest.raises(TypeError, match=r"member 1 is an ensemble\. Pass its members instead"):
        ensemble(td_buffer(), ensemble())
    with pytest.raises(TypeError, match="needs all of storages, samplers and writers"):
        ReplayBufferEnsemble()
    with pytest.raises(RuntimeError, match="got 1 members and storages=StorageEnsemble"):
        ReplayBufferEnsemble(td_buffer(), storages=StorageEnsemble(LazyTensorStorage(4)))
    with pytest.raises(TypeError, match="needs all of storages, samplers and writers"):
        ReplayBufferEnsemble(storages=StorageEnsemble(LazyTensorStorage(4)))
    rows = td_buffer(0, storage=LazyTensorStorage(8, ndim=2))
    with pytest.raises(ValueError, match=r"ndim=1, as .* member 1 has a LazyTensorStorage with"):
        ensemble(td_buffer(), rows)
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(ValueError, match=r"number 0 \(TensorDictReplayBuffer\) does not"):
        ensemble(plain, td_buffer(), track_generations=True)
    with pytest.raises(ValueError, match=r"number 1 \(RoundRobinWriter\) does not"):
        WriterEnsemble(
            RoundRobinWriter(track_generations=True), RoundRobinWriter(), track_generations=True
        )
    assert ensemble(track_generations=True).writer.tracks_generations


def test_a_users_buffer_with_the_mix_in_is_a_member():
    class Mine(ConditionalPriorityUpdates, torchrl.data.TensorDictReplayBuffer):
        pass

    ens = ensemble(Mine(storage=LazyTensorStorage(4), track_generations=True))
    assert ens.writer.tracks_generations


def test_it_can_be_built_of_parts():
    storages = [LazyTensorStorage(4) for _ in range(2)]
    samplers = SamplerEnsemble(*(PrioritizedSampler(4, 1.0, 1.0, eps=0.0) for _ in range(2)))
    writers = torchrl.data.replay_buffers.WriterEnsemble(
        *(RoundRobinWriter(track_generations=True) for _ in range(2))
    )
    ens = ReplayBufferEnsemble(
        storages=StorageEnsemble(*storages),
        samplers=samplers,
        writers=writers,
        batch_size=4,
        track_generations=True,
    )
    assert [type(ens[i]) for i in range(2)] == [ReplayBuffer] * 2
    assert ens.sampler is samplers
    assert isinstance(ens.writer, WriterEnsemble)
    assert [len(storage._attached_entities) for storage in storages] == [1, 1]
    ens[0].extend(torch.arange(4))
    held = ens[1].extend(torch.arange(5), return_generation=True)
    result = ens.update_priority_if_present(
        index=index_of([1] * 5, held[0]), generation=held[1], priority=3.0
    )
    assert result.updated_mask.tolist() == [False] + [True] * 4
    assert leaves(ens[1]) == [3] * 4
    _, info = ens.sample(return_info=True)
    assert info["index_generation"].equal(ens.writer.generations_of(info["index"]))


@pytest.mark.parametrize("picked", [slice(0, 2), [2, 0], torch.tensor([1]), range(1, 3)])
def test_a_slice_is_an_ensemble_of_ours_that_updates_the_same_members(picked):
    ens = ensemble(*members(3), p=[0.2, 0.3, 0.5], generator=torch.Generator())
    part = ens[picked]
    chosen = list(range(3))[picked] if isinstance(picked, slice) else list(picked)
    assert type(part) is ReplayBufferEnsemble
    assert type(part.writer) is WriterEnsemble
    assert [part[i] for i in range(len(chosen))] == [ens[int(i)] for i in chosen]
    assert part._rng is ens._rng
    assert part.sampler.p.tolist() == pytest.approx(
        [float(ens.sampler.p[i]) / sum(float(ens.sampler.p[j]) for j in chosen) for i in chosen]
    )
    sample = part.sample()
    sample["td_error"] = torch.full(sample.shape, 5.0)
    assert part.update_tensordict_priority_if_present(sample).updated_mask.all()
    for member, slot in zip(
        sample["index", "buffer_ids"].reshape(-1), sample["index", "index"].reshape(-1), strict=True
    ):
        assert leaves(ens[int(chosen[member])])[slot] == 5


def test_a_slice_that_samples_from_all_does_so_with_its_own_members():
    ens = ensemble(*members(3), batch_size=6, sample_from_all=True)
    ens.sample()
    assert ens[:2].sample()["index", "buffer_ids"].tolist() == [[0] * 3, [1] * 3]
    late = ReplayBufferEnsemble(*members(3), sample_from_all=True, delayed_init=True)
    assert late[1:].sample(4)["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]
    assert ens[:] is ens
    assert ens[0, 3]["id"] == 3
    assert ens[1:, 2]["id"].tolist() == [2, 2]
    assert type(ens.writer[:2]) is WriterEnsemble
    with pytest.raises(TypeError, match="must be integer"):
        ens[torch.tensor([True, False, True])]


def test_it_follows_a_member_whose_parts_are_replaced():
    ens = ensemble(sample_from_all=True)
    sample = ens.sample()
    ens[0].set_sampler(PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0))
    ens[0].update_priority_if_present(index=[5], generation=[0], priority=1e9)
    assert ens.sample()["index", "index"][0].tolist() == [5] * 4
    former = ens[1].set_storage(LazyTensorStorage(CAPACITY))
    ens[1].extend(ids(range(100, 108)))
    fresh = ens.sample()
    assert (fresh["id"][1] >= 100).all()
    fresh["td_error"] = torch.full((2, 4), 2.0)
    assert ens.update_tensordict_priority_if_present(fresh).updated_mask.all()
    sample["td_error"] = torch.full((2, 4), 3.0)
    assert ens.update_tensordict_priority_if_present(sample).updated_mask[1].tolist() == [False] * 4
    assert former is not ens[1].storage
    for name in ("set_storage", "set_sampler", "set_writer"):
        with pytest.raises(RuntimeError, match=rf"call ensemble\[i\]\.{name}\(\)"):
            getattr(ens, name)(None)


def test_an_asynchronous_members_priorities_count_and_catch_up():
    rbs = members(sync=False)
    ens = ensemble(*rbs, sample_from_all=True)
    ens.sample()
    for rb, slot in zip(rbs, (2, 6), strict=True):
        rb.update_priority_if_present(
            index=range(8), generation=[0] * 8, priority=[1e9 if i == slot else 1 for i in range(8)]
        )
    sample = ens.sample()
    assert sample["index", "index"].tolist() == [[2] * 4, [6] * 4]
    sample["td_error"] = torch.ones(2, 4)
    assert ens.update_tensordict_priority_if_present(sample).updated_mask.all()
    assert leaves(rbs[0]) == [1] * 8
    rbs[1].extend(ids([50]))  # the default is the largest ever given
    assert ens.sample()["id"][1].tolist() == [50] * 4


# ------------------------------------------------------------------ samples


def test_members_that_share_a_storage_see_each_others_writes():
    storage = LazyTensorStorage(CAPACITY)
    rbs = members(storage=storage)
    ens = ensemble(*rbs, sample_from_all=True)
    sample = ens.sample()
    lap(rbs[0])
    sample["td_error"] = torch.full((2, 4), 9.0)
    assert not ens.update_tensordict_priority_if_present(sample).updated_mask.any()
    fresh = all_handles(ens)
    ens.update_priority_if_present(
        **fresh, priority=torch.cat([torch.full((8,), 2.0), torch.full((8,), 3.0)])
    )
    assert (leaves(rbs[0]), leaves(rbs[1])) == ([2] * 8, [3] * 8)


def test_batches_prefetched_before_a_lap_are_stale():
    ens = ensemble(prefetch=2, sample_from_all=True)
    ens.sample()
    ens.synchronize()
    for rb in ens._rbs:
        lap(rb)
    for expected in (False, False):
        sample = ens.sample()
        sample["td_error"] = torch.full((2, 4), 5.0)
        result = ens.update_tensordict_priority_if_present(sample)
        assert result.updated_mask.unique().tolist() == [expected]
    ens.synchronize()
    ens.shutdown()


def test_transforms_of_the_ensemble_cannot_drop_the_stamps_and_the_members_apply():
    rbs = members()
    rbs[0].append_transform(RenameTransform(["id"], ["renamed"]))
    ens = ensemble(*rbs, sample_from_all=True, transform=ExcludeTransform("index"))
    rbs[1].append_transform(RenameTransform(["id"], ["renamed"]))
    sample = ens.sample()
    assert sample["renamed"].shape == (2, 4)
    sample["td_error"] = torch.full((2, 4), 5.0)
    assert ens.update_tensordict_priority_if_present(sample).updated_mask.all()


def test_slices_of_members_are_all_stale_after_a_lap():
    def sliced():
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=SliceSampler(slice_len=2, traj_key="episode"),
            track_generations=True,
        )
        rb.extend(ids(range(8), episode=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])))
        return rb

    ens = ensemble(sliced(), sliced(), sample_from_all=True)
    sample = ens.sample()
    assert sample["index", "index"].shape == sample["index_generation"].shape == (2, 4, 1)
    tables = [rb._table for rb in ens._rbs]

    def live():
        return torch.stack(
            [
                table.is_live(sample["index", "index"][i], sample["index_generation"][i])
                for i, table in enumerate(tables)
            ]
        )

    assert live().all()
    ens[0].extend(ids(range(8), episode=torch.zeros(8, dtype=torch.int64)))
    assert live()[0].logical_not().all()
    assert live()[1].all()
    for rb in ens._rbs:
        rb.set_sampler(PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0))
    sample["td_error"] = torch.full((2, 4, 1), 5.0)
    result = ens.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.reshape(2, 4).tolist() == [[False] * 4, [True] * 4]


def test_the_stamps_of_a_batch_take_one_call_per_member(monkeypatch):
    ens = ensemble()
    for rb, laps in zip(ens._rbs, (0, 3), strict=True):
        for _ in range(laps):
            lap(rb)
    calls = []
    real = SlotGenerations.of
    monkeypatch.setattr(
        SlotGenerations, "of", lambda table, index: calls.append(1) or real(table, index)
    )
    which = torch.arange(256) % 2
    found = ens.writer.generations_of(index_of(which, torch.arange(256) % 8))
    assert found.tolist() == [0, 3] * 128
    assert len(calls) == 2
    blocks = ens.writer.generations_of(index_of([1, 1], torch.arange(16).reshape(2, 8) % 8))
    assert blocks.tolist() == [[3] * 8] * 2
    many = index_of([1, 0, 1, 0, 1, 1], torch.zeros(6, 5, dtype=torch.int64))
    assert ens.writer.generations_of(many)[:, 0].tolist() == [3, 0, 3, 0, 3, 3]


def test_with_tracking_off_it_is_torchrls_and_takes_no_members_lock():
    plain = [TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY)) for _ in range(2)]
    for rb in plain:
        lap(rb)
    ens = ensemble(*plain)
    assert ens._write_lock is ens._stock_write_lock
    assert ens._replay_lock is ens._stock_replay_lock
    assert "index_generation" not in ens.sample().keys()  # noqa: SIM118
    assert not any(hasattr(rb.storage, "_slot_generations") for rb in plain)
    ens.set_sampler(SamplerEnsemble(RandomSampler(), RandomSampler()))
    state = ens.state_dict()
    assert "_learners" not in state
    ens.load_state_dict(state)
    assert len(pickle.loads(pickle.dumps(ens))._rbs) == len(copy.deepcopy(ens)._rbs) == 2
    ens.empty()
    assert [len(rb) for rb in plain] == [0, 0]


# ------------------------------------------------------------------ writing


def routed(*rbs, **kwargs):
    return ensemble(*rbs, routing_key="member", **kwargs)


def rows(which, values=None, **columns):
    values = range(len(which)) if values is None else values
    return ids(values, member=torch.tensor(which), **columns)


def test_a_routed_batch_gives_a_handle_per_row():
    ens = routed(*members(records=0))
    index, generation = ens.extend(rows([1, 0, 1, 1]), return_generation=True)
    assert index["buffer_ids"].tolist() == [1, 0, 1, 1]
    assert index["index"].tolist() == [0, 0, 1, 2]
    assert generation.tolist() == [0, 0, 0, 0]
    ens.extend(rows([1] * 7))  # slots 3 to 7, 0 and 1 of member 1
    result = ens.update_priority_if_present(
        index=index, generation=generation, priority=[5.0, 6.0, 7.0, 8.0]
    )
    assert result.updated_mask.tolist() == [False, True, False, True]
    metadata = ens.extend(rows([0, 1]))
    assert metadata["index_generation"].tolist() == [0, 1]
    one, stamp = ens.add(rows([0])[0], return_generation=True)
    assert (int(one["buffer_ids"]), int(one["index"]), int(stamp)) == (0, 2, 0)
    assert int(ens.add(rows([1])[0])["index_generation"]) == 1


def test_a_row_that_its_call_overwrote_or_a_member_rejected_has_no_handle():
    best = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2),
        writer=TensorDictMaxValueWriter(rank_key="id", track_generations=True),
    )
    ring = td_buffer(0, storage=LazyTensorStorage(2))
    ens = routed(best, ring)
    index, generation = ens.extend(
        rows([0, 1, 0, 1, 0, 1], [9, 1, 8, 2, 7, 3]), return_generation=True
    )
    assert index["index"].tolist() == [0, 0, 1, 1, -1, 0]
    assert generation.tolist() == [0, -1, 0, 0, -1, 1]


def test_rows_are_routed_by_a_dimension_and_other_options_are_torchrls():
    ens = ensemble(*members(records=0), routing_dim=0)
    data = TensorDict({"id": torch.arange(6).reshape(2, 3)}, [2, 3])
    index, generation = ens.extend(data, return_generation=True)
    assert index["buffer_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert index["index"].tolist() == [0, 1, 2] * 2
    assert generation.tolist() == [0] * 6
    with pytest.raises(NotImplementedError):
        ens.extend(data, update_priority=True)
    with pytest.raises(RuntimeError, match="writes are disabled"):
        ensemble().extend(rows([0]))
    with pytest.raises(RuntimeError, match=r"extend\(\) for routing_dim"):
        ens.add(data[0, 0])


def test_a_sample_put_back_in_is_stored_without_its_stamps():
    ens = routed(*members(make=lambda: td_buffer(0)))
    ens.extend(rows([0, 1] * 8))
    sample = ens.sample().exclude("index")
    ens.extend(sample)
    for rb in ens._rbs:
        assert "index_generation" not in rb.storage._storage.keys()  # noqa: SIM118
    sample = ens.sample()
    assert sample["index_generation"].equal(ens.writer.generations_of(sample["index"]))


def test_members_of_which_one_does_not_track_are_written_all_the_same():
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    ens = routed(td_buffer(0), plain)
    metadata = ens.extend(rows([0, 1, 1]))
    assert metadata["index"].tolist() == [0, 0, 1]
    assert "index_generation" not in metadata.keys()  # noqa: SIM118


def test_update_if_present_patches_the_live_records_of_each_member():
    ens = ensemble()
    lap(ens[0])
    result = ens.update_if_present(
        index=index_of([0, 1, 1], [0, 0, 9]),
        generation=torch.tensor([0, 0, 0]),
        patch={"id": torch.tensor([70, 71, 72])},
    )
    assert result.updated.tolist() == [False, True, False]
    assert (int(ens[0][0]["id"]), int(ens[1][0]["id"])) == (0, 71)


def test_empty_kills_the_handles_of_all_members():
    ens = ensemble(*members(sync=False))
    held = all_handles(ens)
    ens.empty()
    assert ens.update_priority_if_present(**held, priority=5.0).num_updated == 0
    assert [stamps(rb).tolist() for rb in ens._rbs] == [[1] * 8] * 2
    assert [len(rb) for rb in ens._rbs] == [0, 0]
    assert ens.stats()["size"] == 0
    for rb in ens._rbs:
        lap(rb)
    assert ens.update_priority_if_present(**held, priority=5.0).num_updated == 0
    assert ens.sample()["index_generation"].unique().tolist() == [2]


# ------------------------------------------------------------------ atomicity


def test_a_sample_an_update_and_a_write_wait_for_the_lock_of_each_member():
    rbs = members(records=0)
    ens = routed(*rbs)
    ens.extend(rows([0, 1] * 8))
    sample = ens.sample()
    sample["td_error"] = torch.ones(2, 4)
    calls = (
        ens.sample,
        lambda: ens.can_sample(4),
        lambda: ens.update_tensordict_priority_if_present(sample),
        lambda: ens.extend(rows([0, 1])),
        ens.state_dict,
        lambda: copy.deepcopy(ens),
    )
    for rb in rbs:
        for call in calls:
            with rb._table.lock:
                waiting = Thread(call)
                waiting.join_briefly(0.05)
                assert waiting.is_alive()
            waiting.join()


def test_no_write_comes_between_the_stamps_and_the_data_of_a_sample(monkeypatch):
    ens = ensemble(sample_from_all=True)
    real = WriterEnsemble.generations_of
    writers = []

    def spy(writer, index):
        found = real(writer, index)
        writers.extend(Thread(lambda rb=rb: lap(rb)) for rb in ens._rbs)
        for thread in writers:
            thread.join_briefly(0.05)
            assert thread.is_alive()
        return found

    monkeypatch.setattr(WriterEnsemble, "generations_of", spy)
    sample = ens.sample()
    monkeypatch.undo()
    for thread in writers:
        thread.join()
    assert sample["index_generation"].unique().tolist() == [0]
    sample["td_error"] = torch.full((2, 4), 5.0)
    assert ens.update_tensordict_priority_if_present(sample).num_updated == 0


def test_a_bad_priority_is_found_while_all_locks_are_held(monkeypatch):
    """No write between validating the first member and updating the second."""
    ens = ensemble()
    seen = []
    real = ConditionalPriorityUpdates.update_priority_if_present

    def spy(rb, **kwargs):
        seen.append([other._table.lock.is_held() for other in ens._rbs])
        return real(rb, **kwargs)

    for rb in ens._rbs:
        monkeypatch.setattr(type(rb), "update_priority_if_present", spy)
    ens.update_priority_if_present(**all_handles(ens), priority=2.0)
    assert seen == [[True, True]] * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_members_locks_are_taken_in_one_order_whatever_the_order_of_the_members(order, monkeypatch):
    rbs = members(3)
    ens = ensemble(*(rbs[i] for i in order))
    taken = []
    real = StorageLock.within

    def spy(lock, timeout):
        if not lock.is_held():
            taken.append(lock.order)
        return real(lock, timeout)

    monkeypatch.setattr(StorageLock, "within", spy)
    held = all_handles(ens)
    patch = {"id": torch.zeros(24, dtype=torch.int64)}
    for call in (
        ens.sample,
        ens.stats,
        lambda: ens.update_priority_if_present(**held, priority=2.0),
        lambda: ens.update_if_present(**held, patch=patch),
    ):
        taken.clear()
        call()
        assert taken == sorted(rb._table.lock.order for rb in rbs)


def test_a_thread_that_holds_a_members_lock_cannot_use_the_ensemble():
    ens = ensemble()
    for rb in ens._rbs:
        with rb._table.lock, pytest.raises(RuntimeError, match="a thread that holds some of them"):
            ens.sample()
    with ens._replay_lock:  # all of them
        ens.sample()
        with ens._write_lock:
            lap(ens[0])


def test_ensembles_of_the_same_members_in_other_orders_do_not_deadlock():
    rbs = members(prefetch=1, batch_size=4)
    one = ensemble(*rbs, prefetch=1)
    other = ensemble(*reversed(rbs), prefetch=1)
    barrier = threading.Barrier(3)

    def work(ens, calls):
        barrier.wait()
        for _ in range(15):
            for call in calls:
                call(ens)

    def update(ens):
        ens.update_priority_if_present(**all_handles(ens), priority=2.0)

    threads = [
        Thread(lambda: work(one, [lambda e: e.sample(), update, lambda e: e.state_dict()])),
        Thread(lambda: work(other, [lambda e: e.state_dict(), lambda e: e.sample(), update])),
        Thread(lambda: work(None, [lambda _: lap(rbs[0]), lambda _: rbs[1].sample()])),
    ]
    for thread in threads:
        thread.join(60)
    for rb in (one, other, *rbs):
        rb.synchronize()
        rb.shutdown()


DEFAULT = 5000.0  # above every record's own priority, so that the default never moves


def own_priority(records):
    return (records * 7919 % 4093 + 1).to(torch.float32)


class Race:
    """A writer for each member, two learners that update late; the priorities of other records."""

    def __init__(self, conditional, seconds):
        tensor = LazyTensorStorage
        self.rbs = members(2, storage=None, make=lambda storage: td_buffer(0, storage=tensor(32)))
        self.ens = ensemble(*self.rbs, batch_size=16)
        self.ids = iter(range(10**9))
        for rb in self.rbs:
            self.extend(rb, 32)
            rb.update_priority(torch.tensor([0]), torch.tensor([DEFAULT]))
            self.extend(rb, 32)
        self.conditional, self.deadline = conditional, time.monotonic() + seconds
        self.updated, self.stale, self.misapplied = [], [], []
        # Each waits for the other, lest a lap of the ring pass before any update comes.
        self.written, self.sampled = threading.Semaphore(0), threading.Semaphore(0)

    def extend(self, rb, rows):
        rb.extend(ids([next(self.ids) for _ in range(rows)]))

    def write(self, rb):
        rows = 0
        while time.monotonic() < self.deadline:
            rows = rows % 11 + 1
            self.sampled.acquire(timeout=1)
            self.extend(rb, rows)
            self.written.release()

    def learn(self):
        batches = []
        while time.monotonic() < self.deadline:
            batches.append(self.ens.sample())
            self.sampled.release()
            self.written.acquire(timeout=1)
            if len(batches) >= 4:
                self.update(batches.pop(0))

    def update(self, late):
        late["td_error"] = own_priority(late["id"])
        if self.conditional:
            result = self.ens.update_tensordict_priority_if_present(late)
            self.updated.append(result.num_updated)
            self.stale.append(result.num_stale)
            return
        for member, rb in enumerate(self.rbs):
            rows = late["index", "buffer_ids"] == member
            if rows.any():
                rb.update_priority(late["index", "index"][rows], late["td_error"][rows])

    def check(self, rb):
        with rb._table.lock:
            held, own = torch.tensor(leaves(rb)), own_priority(rb.storage[:]["id"])
        self.misapplied.append(int(((held != own) & (held != DEFAULT)).sum()))


def run_threads(conditional, seconds=1):
    race = Race(conditional, seconds)
    threads = [Thread(lambda rb=rb: race.write(rb)) for rb in race.rbs]
    threads += [Thread(race.learn), Thread(race.learn)]
    while time.monotonic() < race.deadline:
        for rb in race.rbs:
            race.check(rb)
        time.sleep(0.01)
    for thread in threads:
        thread.join(seconds + 30)
    return sum(race.misapplied), sum(race.updated), sum(race.stale)


def test_threads_never_put_a_priority_on_another_record():
    misapplied, updated, stale = run_threads(conditional=True)
    assert updated > 0
    assert stale > 0
    assert misapplied == 0


def test_the_same_threads_do_it_with_update_priority():
    assert run_threads(conditional=False)[0] > 0


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_threads_never_put_a_priority_on_another_record_for_a_minute():
    assert run_threads(conditional=True, seconds=60)[0] == 0


def test_the_locks_are_given_back_when_a_call_raises(monkeypatch):
    ens = ensemble()
    monkeypatch.setattr(type(ens.sampler), "sample", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ens.sample()
    monkeypatch.setattr(ens, "_follow_members", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ens.stats()
    for rb in ens._rbs:
        assert not rb._table.lock.is_held()
        Thread(lambda rb=rb: lap(rb)).join()


def test_a_hold_that_waited_while_a_member_moved_holds_the_new_storages_lock():
    ens = ensemble()
    former = ens[1]._table
    seen = []

    def look():
        with ens._replay_lock:
            seen.append((ens[1]._table.lock.is_held(), former.lock.is_held()))

    with former.lock:
        waiting = Thread(look)
        waiting.join_briefly(0.05)
        ens[1].set_storage(LazyTensorStorage(CAPACITY))
    waiting.join()
    assert seen == [(True, False)]


# ------------------------------------------------------------------ checkpoints, copies, processes


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("sync", [True, False])
def test_a_restore_brings_the_members_handles_and_priorities_back_and_no_others(
    storage, sync, checkpoint
):
    def made():
        return [td_buffer(storage=storage(CAPACITY), sync=sync) for _ in range(2)]

    ens = ensemble(*made())
    held = all_handles(ens)
    ens.update_priority_if_present(**held, priority=torch.arange(2.0, 18.0))
    load = checkpoint(ens)
    for rb in ens._rbs:
        rb.extend(ids(range(100, 103)))
    later = all_handles(ens)
    load(ens)
    assert [leaves(rb) for rb in ens._rbs] == [list(range(2, 10)), list(range(10, 18))]
    assert (
        ens.update_priority_if_present(**later, priority=99.0).updated_mask.tolist()
        == ([False] * 3 + [True] * 5) * 2
    )
    load(ens)
    for rb in ens._rbs:
        rb.extend(ids(range(100, 103)))
    assert not ens.update_priority_if_present(**later, priority=99.0).updated_mask[:3].any()
    fresh = ensemble(*[td_buffer(0, storage=storage(CAPACITY), sync=sync) for _ in range(2)])
    load(fresh)
    ens.sample()
    fresh.sample()
    assert [leaves(rb) for rb in fresh._rbs] == [list(range(2, 10)), list(range(10, 18))]
    assert fresh.update_priority_if_present(**held, priority=3.0).updated_mask.all()


def test_a_restore_of_members_that_share_a_storage_keeps_the_priorities_of_each(checkpoint):
    ens = ensemble(*members(storage=LazyTensorStorage(CAPACITY)))
    held = all_handles(ens)
    ens.update_priority_if_present(**held, priority=torch.arange(2.0, 18.0))
    load = checkpoint(ens)
    bystander = td_buffer(0, storage=ens[0].storage)
    bystander.update_priority_if_present(index=[0], generation=[1], priority=50.0)
    lap(ens[0])
    bystander.update_priority_if_present(index=[0], generation=[2], priority=60.0)
    load(ens)
    assert [leaves(rb) for rb in ens._rbs] == [list(range(2, 10)), list(range(10, 18))]
    assert leaves(bystander) == [60] * 8  # the default: its priorities were those of other records
    assert ens.update_priority_if_present(**held, priority=3.0).updated_mask.all()


def test_a_checkpoint_that_does_not_fit_a_member_changes_none(tmp_path):
    ens = ensemble()
    held = all_handles(ens)
    small = ensemble(td_buffer(), td_buffer(4, storage=LazyTensorStorage(4)))
    small.dumps(tmp_path)
    with pytest.raises(ValueError, match="for 4 slots: this buffer has 8"):
        ens.load_state_dict(small.state_dict())
    with pytest.raises(ValueError, match="for 4 slots: this buffer has 8"):
        ens.loads(tmp_path)
    with pytest.raises(ValueError, match="The checkpoint has 3 members: this ensemble has 2"):
        ens.load_state_dict(ensemble(*members(3)).state_dict())
    ensemble(*members(3)).dumps(tmp_path / "three")
    with pytest.raises(ValueError, match="The checkpoint has 3 members: this ensemble has 2"):
        ens.loads(tmp_path / "three")
    with pytest.raises(FileNotFoundError):
        ens.loads(tmp_path / "nothing")
    assert ens.update_priority_if_present(**held, priority=3.0).updated_mask.all()


def test_a_restore_that_fails_halfway_leaves_no_handle_alive_in_any_member(monkeypatch):
    ens = ensemble()
    held = all_handles(ens)
    state = copy.deepcopy(ens.state_dict())
    monkeypatch.setattr(ens.writer, "load_state_dict", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ens.load_state_dict(state)
    assert ens.update_priority_if_present(**held, priority=3.0).num_updated == 0


@pytest.mark.parametrize("sync", [True, False])
def test_a_default_priority_that_is_no_integer_survives_a_dump(sync, tmp_path):
    ens = ensemble(*members(sync=sync))
    ens.update_priority_if_present(**all_handles(ens), priority=2.5)
    ens.dumps(tmp_path)
    fresh = ensemble(*members(sync=sync))
    for rb in fresh._rbs:
        rb.update_priority(0, 7)
    fresh.loads(tmp_path)
    for rb in fresh._rbs:
        rb.extend(ids([9]))
    fresh.sample()
    assert [leaves(rb) for rb in fresh._rbs] == [[2.5] * 8] * 2


def test_a_member_that_keeps_the_best_is_restored_with_its_ranks(checkpoint):
    def made():
        best = TensorDictReplayBuffer(
            storage=LazyTensorStorage(2),
            writer=TensorDictMaxValueWriter(rank_key="id", track_generations=True),
        )
        return ensemble(best, td_buffer(), sample_from_all=True)

    ens = made()
    held = ens[0].extend(ids([5, 1]), return_generation=True)
    load = checkpoint(ens)
    fresh = made()
    load(fresh)
    assert fresh[0]._table.is_live(*held).all()
    assert fresh[0].extend(ids([0, 3])).tolist() == [-1, 1]
    ring = ensemble(td_buffer(2, storage=LazyTensorStorage(2)), td_buffer(), sample_from_all=True)
    state = ring.state_dict()
    with pytest.raises(ValueError, match="has no ranks"):
        ens.load_state_dict(state)
    assert ens[0]._table.is_live(*held).all()


def test_members_with_different_keys_make_a_lazy_sample_that_updates_too():
    other = td_buffer(0)
    other.extend(ids(range(8), extra=torch.zeros(8)))
    ens = ensemble(td_buffer(), other, sample_from_all=True)
    sample = ens.sample()
    assert ens.update_tensordict_priority_if_present(sample).updated_mask.all()
    lap(ens[0])
    sample["td_error"] = torch.full((2, 4), 4.0)
    result = ens.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == [[False] * 4, [True] * 4]
    assert max(leaves(other)) == 4


def test_torchrls_checkpoint_has_no_stamps_that_count(tmp_path):
    stock = [
        torchrl.data.TensorDictPrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CAPACITY))
        for _ in range(2)
    ]
    for rb in stock:
        lap(rb)
    theirs = torchrl.data.ReplayBufferEnsemble(*stock)
    ens = ensemble()
    held = all_handles(ens)
    ens.load_state_dict(theirs.state_dict())
    assert ens.update_priority_if_present(**held, priority=3.0).num_updated == 0
    theirs.dumps(tmp_path)
    ens.loads(tmp_path)
    assert ens.update_priority_if_present(**all_handles(ens), priority=3.0).num_stale == 0
    ens.dumps(tmp_path / "ours")
    theirs.loads(tmp_path / "ours")


def test_a_memmap_member_dumped_where_it_lives_brings_no_handle_back(tmp_path):
    def made(records):
        inside = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage" / "0")
        return ensemble(td_buffer(records, storage=inside), td_buffer(records))

    ens = made(CAPACITY)
    held = all_handles(ens)
    ens.dumps(tmp_path)
    ens[0].extend(ids([99]))
    del ens  # that run ends
    fresh = made(0)
    fresh.loads(tmp_path)
    result = fresh.update_priority_if_present(**held, priority=3.0)
    assert result.updated_mask.tolist() == [False] * 8 + [True] * 8


def test_restoring_while_batches_are_prefetched_does_not_deadlock(checkpoint):
    rbs = members(prefetch=2, batch_size=4)
    ens = ensemble(*rbs, prefetch=2)
    ens.sample()
    rbs[0].sample()
    load = checkpoint(ens)
    done = Thread(lambda: load(ens))
    done.join()
    ens.sample()
    for rb in (ens, *rbs):
        rb.synchronize()
        rb.shutdown()


def test_a_restore_waits_for_the_batches_of_members_before_it_takes_the_locks(monkeypatch):
    member = td_buffer(prefetch=1, batch_size=4)
    ens = ensemble(member)
    state = copy.deepcopy(ens.state_dict())
    go, sample = threading.Event(), member._sample
    member.sample()
    member.synchronize()

    def slow(batch_size):
        go.wait(20)
        return sample(batch_size)

    monkeypatch.setattr(member, "_sample", slow)
    member.sample()  # the one that is there; the next begins to wait
    loading = Thread(lambda: ens.load_state_dict(state))
    loading.join_briefly(0.2)
    go.set()
    loading.join(10)
    member.shutdown()


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda ens: pickle.loads(pickle.dumps(ens))}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("sync", [True, False])
def test_a_copy_is_an_independent_ensemble_of_the_copied_members(copy_of, sync):
    rbs = members(sync=sync)
    for rb in rbs:
        rb.append_transform(RenameTransform(["id"], ["renamed"]))
    ens = ensemble(*rbs, sample_from_all=True, generator=torch.Generator())
    held = all_handles(ens)
    ens.update_priority_if_present(**held, priority=torch.arange(2.0, 18.0))
    twin = copy_of(ens)
    assert type(twin) is ReplayBufferEnsemble
    for i in range(2):
        assert twin.storage._storages[i] is twin[i].storage
        assert twin.writer._writers[i] is twin[i].writer
        assert twin.sampler._samplers[i] is twin[i]._priority_sampler
        assert twin[i].storage is not ens[i].storage
        assert leaves(twin[i]) == leaves(ens[i])
    assert twin.sampler._samplers[0]._rng is twin._rng is not None
    lap(ens[0])
    lap(twin[1])
    assert ens.update_priority_if_present(**held, priority=3.0).updated_mask.tolist() == (
        [False] * 8 + [True] * 8
    )
    assert twin.update_priority_if_present(**held, priority=3.0).updated_mask.tolist() == (
        [True] * 8 + [False] * 8
    )
    sample = twin.sample()
    assert sample["index_generation"].equal(twin.writer.generations_of(sample["index"]))
    assert "renamed" in sample.keys()  # noqa: SIM118
    assert len(ens[0].storage._attached_entities) == len(twin[0].storage._attached_entities) == 1


def test_an_ensemble_whose_members_share_a_storage_is_not_copied():
    ens = ensemble(*members(storage=LazyTensorStorage(CAPACITY)))
    for copy_of in COPIES.values():
        with pytest.raises(RuntimeError, match="members share a storage can't be copied"):
            copy_of(ens)


def write_to_second(ens, pipe):
    torch.set_num_threads(1)
    index = ens[1].extend(ids(range(100, 103)))
    sample = ens.sample()
    pipe.send((index.tolist(), sample["index_generation"].shape == (2, 4)))


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_process_that_writes_to_a_member_makes_the_learners_handles_stale(method):
    ens = ensemble(*members(storage=None, make=shareable), sample_from_all=True)
    ens.share()
    held = all_handles(ens)
    ens.update_priority_if_present(**held, priority=2.0)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=write_to_second, args=(ens, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == ([0, 1, 2], True)
    process.join(30)
    result = ens.update_priority_if_present(**held, priority=5.0)
    assert result.updated_mask.tolist() == [True] * 8 + [False] * 3 + [True] * 5
    assert leaves(ens[1]) == [2] * 3 + [5] * 5
    assert (ens.storage._storages[1][:]["id"][:3] >= 100).all()


def shareable(storage):
    return td_buffer(storage=LazyMemmapStorage(CAPACITY), sync=False)


def test_a_prefetching_ensemble_is_not_sent_to_another_process():
    ens = ensemble(*members(storage=None, make=shareable), prefetch=1)
    process = multiprocessing.get_context("spawn").Process(target=len, args=(ens,))
    with pytest.raises(RuntimeError, match="prefetch=1 can't be sent"):
        process.start()
    with pytest.raises(RuntimeError, match="ListStorage can't be shared"):
        ensemble(td_buffer(storage=ListStorage(CAPACITY))).share()


# ------------------------------------------------------------------ a TorchRL class


@pytest.mark.parametrize("name", ["ReplayBufferEnsemble", "WriterEnsemble"])
def test_each_argument_of_a_torchrl_method_is_one_of_ours(name):
    stock = getattr(torchrl.data.replay_buffers, name)
    ours = {"ReplayBufferEnsemble": ReplayBufferEnsemble, "WriterEnsemble": WriterEnsemble}[name]
    assert issubclass(ours, stock)
    for method, function in inspect.getmembers(stock, inspect.isfunction):
        if method.startswith("_") and method != "__getitem__":
            continue
        theirs = set(inspect.signature(function).parameters)
        assert theirs <= set(inspect.signature(getattr(ours, method)).parameters), method
    assert issubclass(ReplayBufferEnsemble, ReplayBuffer)
