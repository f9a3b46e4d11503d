"""The storages that keep their records in a list work as the others do; what can't is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from common import CAPACITY, PER, buffer, handles, ids, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
)
from torchrl.data.replay_buffers import Storage, StorageEnsemble, StoreStorage
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

LISTS = [ListStorage, LazyStackStorage, CompressedListStorage]


def lists(make, records=CAPACITY, **kwargs):
    return td_buffer(records, storage=make(CAPACITY), batch_size=4, **kwargs)


@pytest.mark.parametrize("make", LISTS)
def test_a_sample_gets_its_priorities_and_after_a_lap_none(make):
    rb = lists(make)
    sample = rb.sample()
    assert sample["id"].tolist() == sample["index"].tolist()
    sample["td_error"] = torch.full((4,), 3.0)
    expected = [3.0 if slot in sample["index"] else 1.0 for slot in range(CAPACITY)]

    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4
    assert leaves(rb) == expected
    rb.sampler._empty()
    rb.extend(ids(range(8, 16)))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 0
    assert leaves(rb) == [1] * 8


@pytest.mark.parametrize("make", LISTS)
def test_a_batch_larger_than_the_list_keeps_its_last_rows(make):
    rb = lists(make, records=5)
    index, generation = rb.extend(ids(range(5, 18)), return_generation=True)
    assert index.tolist() == [5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert generation.tolist() == [-1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 2, 2]
    assert [int(rb.storage[slot]["id"]) for slot in range(8)] == [16, 17, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("make", LISTS)
def test_single_records_assignments_and_write_at_advance_their_slots(make):
    rb = lists(make, records=0)
    assert [rb.add(ids([record])[0]) for record in range(3)] == [0, 1, 2]
    before = handles(rb, [0, 1, 2])
    rb[0] = ids([10])[0]
    rb.writer.write_at(torch.tensor([2]), ids([12]))
    result = rb.update_priority_if_present(**before, priority=4.0)
    assert result.updated_mask.tolist() == [False, True, False]
    assert rb.writer.generations_of([0, 1, 2, 3]).tolist() == [1, 0, 1, -1]
    assert leaves(rb)[:3] == [1, 4, 1]


@pytest.mark.parametrize("make", LISTS)
def test_an_emptied_list_has_no_live_handle(make):
    rb = lists(make)
    before = handles(rb)
    rb.empty()
    rb.extend(ids(range(8)))
    assert rb.update_priority_if_present(**before, priority=4.0).num_updated == 0


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_goes_its_own_way(make, copied):
    rb = lists(make)
    before = handles(rb)
    other = copied(rb)
    other.extend(ids(range(8, 12)))
    assert rb.update_priority_if_present(**before, priority=4.0).num_updated == 8
    result = other.update_priority_if_present(**before, priority=4.0)
    assert result.updated_mask.tolist() == [False] * 4 + [True] * 4
    assert [int(rb.storage[slot]["id"]) for slot in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("make", LISTS)
def test_a_restored_state_brings_its_own_handles_back(make):
    rb = lists(make)
    before = handles(rb)
    state = copy.deepcopy(rb.state_dict())
    rb.extend(ids(range(8, 12)))
    late = handles(rb, range(4))

    rb.load_state_dict(state)

    assert rb.update_priority_if_present(**before, priority=4.0).num_updated == 8
    assert rb.update_priority_if_present(**late, priority=4.0).num_updated == 0
    resumed = lists(make, records=0)
    resumed.load_state_dict(state)
    assert resumed.update_priority_if_present(**before, priority=4.0).num_updated == 8


def test_the_state_of_a_compressed_storage_aliases_its_records_and_that_is_noticed():
    rb = lists(CompressedListStorage)
    before = handles(rb)
    state = rb.state_dict()  # no copy: the records run on
    rb.extend(ids(range(8, 11)))

    rb.load_state_dict(state)

    result = rb.update_priority_if_present(**before, priority=4.0)
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert [int(rb.storage[slot]["id"]) for slot in range(4)] == [8, 9, 10, 3]


def test_a_dump_of_a_compressed_storage(tmp_path):
    rb = lists(CompressedListStorage)
    rb.update_priority_if_present(**handles(rb, [2]), priority=4.0)
    before = handles(rb)
    rb.dumps(tmp_path)
    resumed = lists(CompressedListStorage, records=0)
    resumed.loads(tmp_path)
    assert leaves(resumed) == [1, 1, 4, 1, 1, 1, 1, 1]
    assert resumed.update_priority_if_present(**before, priority=2.0).num_updated == 8
    assert [int(resumed.storage[slot]["id"]) for slot in range(8)] == list(range(8))


def test_records_of_different_shapes_in_a_lazy_stack():
    rb = TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyStackStorage(2), batch_size=3, track_generations=True
    )
    for length in (3, 5):
        rb.add(TensorDict({"obs": torch.zeros(length)}))
    sample = rb.sample()
    rb.add(TensorDict({"obs": torch.zeros(4)}))
    sample["td_error"] = torch.full((3,), 3.0)
    result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == (sample["index"] == 1).tolist()


@pytest.mark.parametrize("make", LISTS)
def test_a_list_is_not_shared_between_processes(make):
    with pytest.raises(RuntimeError, match="LazyMemmapStorage"):
        lists(make).share()


class Elsewhere(Storage):
    """A user's storage, of which nobody knows how it names its slots."""

    def __init__(self):
        super().__init__(4)

    def set(self, cursor, data, *, set_cursor=True):
        raise NotImplementedError

    def get(self, index):
        raise NotImplementedError

    def __len__(self):
        return 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass

    def _empty(self):
        pass

    def contains(self, item):
        return False


@pytest.mark.parametrize(
    "storage",
    [
        StorageEnsemble(ListStorage(4), ListStorage(4)),
        StoreStorage.__new__(StoreStorage),  # its constructor wants a Redis server
        Elsewhere(),
    ],
    ids=lambda storage: type(storage).__name__,
)
def test_a_storage_of_another_kind_is_refused_with_what_to_use(storage):
    with pytest.raises(TypeError, match="LazyMemmapStorage"):
        SlotGenerations.attach(storage)
    if isinstance(storage, Elsewhere):
        with pytest.raises(TypeError, match="got Elsewhere"):
            ReplayBuffer(storage=storage, collate_fn=list, track_generations=True)
        assert ReplayBuffer(storage=storage, collate_fn=list).storage is storage  # off is off


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("records_on", ["cpu", "cuda"])
@pytest.mark.parametrize("handles_on", ["cpu", "cuda"])
def test_handles_may_be_on_another_device_than_the_storage(records_on, handles_on):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, device=records_on),
        sampler=PrioritizedSampler(CAPACITY, **PER, device="cpu"),  # TorchRL's wheel has no other
        batch_size=4,
        track_generations=True,
    )
    rb.extend(ids(range(8)).to(records_on))
    before = handles(rb)
    rb.writer._cursor = 0
    rb.extend(ids(range(8, 11)).to(records_on))

    result = rb.update_priority_if_present(
        index=before["index"].to(handles_on),
        generation=before["generation"].to(handles_on),
        priority=torch.arange(2.0, 10.0, device=handles_on),
    )

    assert result.updated_mask.device.type == handles_on
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert leaves(rb) == [1, 1, 1, 5, 6, 7, 8, 9]
    sample = rb.sample().to(handles_on)
    sample["td_error"] = torch.full((4,), 3.0, device=handles_on)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4


def test_a_list_may_grow_by_a_slice_at_its_end():
    rb = buffer(0, storage=ListStorage(CAPACITY))
    rb.write_all(list(range(4)))
    assert rb.storage[:] == list(range(4))
    held = handles(rb, range(4))
    rb[2:8] = list(range(10, 14))
    assert rb.storage[:] == [0, 1, 10, 11, 12, 13]
    assert rb._table.is_live(**held).tolist() == [True, True, False, False]
    assert leaves(rb) == [1] * 6 + [0, 0]
    with pytest.raises(IndexError, match="slots from 0 to 7: got 9"):
        rb[2:] = list(range(8))
    assert len(rb) == 6
