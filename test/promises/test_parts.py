"""Parts that are replaced, or shared by two: what another thread or storage may do meanwhile."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from common import CAPACITY, Thread, buffer, handles, ids, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from torchrl.data.replay_buffers import PrioritizedSampler, RandomSampler
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    RoundRobinWriter,
    SlotGenerations,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.generations.core.history import BASE_BITS

GRACE = 0.1


def sampler(size=CAPACITY):
    return PrioritizedSampler(size, 1.0, 1.0, eps=0.0)


# ------------------------------------------------------------------ a part replaced meanwhile


def race(rb, monkeypatch, first, second):
    """Lets ``first`` stand inside of all locks until ``second`` waits for them in a thread.

    ``second`` has looked at the buffer's parts by then, and must look again.
    """
    inside, go = threading.Event(), threading.Event()
    owner, name = first["line"]
    inner = getattr(owner, name)

    def stands(*args, **kwargs):
        result = inner(*args, **kwargs)
        if threading.current_thread() is one:
            inside.set()
            assert go.wait(20)
        return result

    monkeypatch.setattr(owner, name, stands)
    one = threading.Thread(target=lambda: outcome.append(attempt(first["call"])))
    outcome: list = []
    one.start()
    assert inside.wait(20)
    two = Thread(lambda: attempt(second))
    two.join_briefly(GRACE)  # it stands at the locks
    assert two.is_alive()
    go.set()
    one.join(20)
    return outcome[0], two.join()


def attempt(call):
    try:
        return call()
    except Exception as error:
        return error


def whole(rb):
    """The parts of a buffer know each other, and it writes, samples and updates as one."""
    assert rb.writer._storage is rb.storage
    assert rb in rb.storage._attached_entities
    assert rb._write_lock is rb._table.lock
    rb.extend(ids(range(50, 58)))
    sample = rb.sample()
    assert set(sample["id"].tolist()) <= set(range(50, 58))
    result = rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=3.0
    )
    assert result.num_stale == 0


def moves(rb, storage):
    return {"line": (rb, "_get_collate_fn"), "call": lambda: rb.set_storage(storage)}


SECOND = {
    "load_state_dict": lambda rb, state, _: rb.load_state_dict(state),
    "loads": lambda rb, _, path: rb.loads(path),
    "dumps": lambda rb, _, path: rb.dumps(path.with_name("another")),
    "state_dict": lambda rb, _, __: rb.state_dict(),
    "copy": lambda rb, _, __: copy.deepcopy(rb),
    "set_storage": lambda rb, _, __: rb.set_storage(LazyTensorStorage(CAPACITY)),
    "set_sampler": lambda rb, _, __: rb.set_sampler(sampler()),
    "set_writer": lambda rb, _, __: rb.set_writer(
        TensorDictRoundRobinWriter(track_generations=True)
    ),
    "empty": lambda rb, _, __: rb.empty(),
}


@pytest.mark.parametrize("second", list(SECOND))
def test_whoever_waited_for_set_storage_works_on_the_storage_that_is_there_now(
    second, monkeypatch, tmp_path
):
    rb = td_buffer(batch_size=4)
    held, former = handles(rb), rb.storage
    state = copy.deepcopy(rb.state_dict())
    rb.dumps(tmp_path / "dump")
    storage = LazyTensorStorage(CAPACITY)
    done, result = race(
        rb,
        monkeypatch,
        moves(rb, storage),
        lambda: SECOND[second](rb, state, tmp_path / "dump"),
    )
    assert done is former
    if second == "dumps":
        assert "non-initialized" in str(result)
        assert not (tmp_path / "another").exists()
    else:
        assert not isinstance(result, Exception), result
    if second != "set_storage":
        assert rb.storage is storage
    if second in ("load_state_dict", "loads"):
        assert rb[:]["id"].tolist() == list(range(CAPACITY))
        assert len(former) == CAPACITY
    if second == "state_dict":
        assert result["_storage"]["_len"] == 0
    if second == "copy":
        assert len(result) == 0
    if second not in ("load_state_dict", "loads"):
        assert rb._table.is_live(**held).tolist() == [False] * CAPACITY
    whole(rb)


@pytest.mark.parametrize("second", ["load_state_dict", "loads"])
def test_a_restore_that_waited_for_a_smaller_storage_is_refused_and_changes_nothing(
    second, monkeypatch, tmp_path
):
    rb = td_buffer(batch_size=4)
    state = copy.deepcopy(rb.state_dict())
    rb.dumps(tmp_path / "dump")
    _, error = race(
        rb,
        monkeypatch,
        moves(rb, LazyTensorStorage(4)),
        lambda: SECOND[second](rb, state, tmp_path / "dump"),
    )
    assert isinstance(error, ValueError), error
    assert len(rb) == 0
    assert not rb.storage.initialized


@pytest.mark.parametrize("second", ["load_state_dict", "loads"])
def test_a_restore_that_waited_for_another_kind_of_sampler_is_refused(
    second, monkeypatch, tmp_path
):
    rb = tracked(LazyTensorStorage(CAPACITY))
    rb.extend(ids(range(CAPACITY)))
    state = copy.deepcopy(rb.state_dict())
    rb.dumps(tmp_path / "dump")
    rb.extend(ids([100]))
    held = handles(rb)
    replaced = {
        "line": (rb._table.sharing, "join_first_write"),
        "call": lambda: rb.set_sampler(sampler()),
    }
    _, error = race(rb, monkeypatch, replaced, lambda: SECOND[second](rb, state, tmp_path / "dump"))
    assert isinstance(error, (TypeError, ValueError, KeyError)), error
    assert rb._table.is_live(**held).tolist() == [True] * CAPACITY
    assert rb[:]["id"].tolist() == [100, *range(1, 8)]


def test_set_storage_binds_the_writer_that_the_buffer_has_when_the_locks_are_free(monkeypatch):
    rb = td_buffer(batch_size=4)
    writer = TensorDictRoundRobinWriter(track_generations=True)
    replaced = {
        "line": (rb._table.sharing, "install_writer_cells"),
        "call": lambda: rb.set_writer(writer),
    }
    storage = LazyTensorStorage(CAPACITY)
    race(rb, monkeypatch, replaced, lambda: rb.set_storage(storage))
    assert rb.writer is writer
    assert rb.storage is storage
    whole(rb)


def test_a_sampler_that_waited_for_a_larger_storage_is_refused(monkeypatch):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=RandomSampler(),
        track_generations=True,
    )
    rb.extend(torch.arange(4))
    _, error = race(
        rb,
        monkeypatch,
        moves(rb, LazyTensorStorage(CAPACITY)),
        lambda: rb.set_sampler(sampler(4)),
    )
    assert isinstance(error, ValueError), error
    assert isinstance(rb.sampler, RandomSampler)


def test_a_set_storage_that_fails_puts_the_former_back(monkeypatch):
    rb = td_buffer(batch_size=4)
    former, other = rb.storage, LazyTensorStorage(CAPACITY)

    def failing(storage):
        if storage is other:
            raise OSError("no room")
        inner(storage)

    inner = rb.writer.register_storage
    monkeypatch.setattr(rb.writer, "register_storage", failing)
    with pytest.raises(OSError, match="no room"):
        rb.set_storage(other)
    assert rb.storage is former
    assert rb not in other._attached_entities
    assert rb[:]["id"].tolist() == list(range(CAPACITY))
    whole(rb)


# ------------------------------------------------------------------ no part at all


@pytest.mark.parametrize(
    ("name", "needs"),
    [("set_storage", "Storage"), ("set_sampler", "Sampler"), ("set_writer", "Writer")],
)
def test_no_part_is_refused_by_name(name, needs):
    rb = td_buffer(batch_size=4)
    held = handles(rb)
    with pytest.raises(TypeError, match=rf"{name}\(\) needs a {needs}: got NoneType\."):
        getattr(rb, name)(None)
    assert rb._table.is_live(**held).tolist() == [True] * CAPACITY
    whole(rb)


def test_no_state_is_refused_by_name():
    rb = td_buffer(batch_size=4)
    held = handles(rb)
    with pytest.raises(TypeError, match="state"):
        rb.load_state_dict(None)
    assert rb._table.is_live(**held).tolist() == [True] * CAPACITY


OUT_OF_RANGE = [
    torch.tensor([0, 64]),
    torch.tensor([8]),
    8,
    [1, 10**6],
    torch.tensor([2**40]),
    torch.tensor([[0], [9]]),
    (torch.tensor([9]),),
]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("index", OUT_OF_RANGE, ids=str)
def test_a_priority_of_a_slot_out_of_range_is_refused_and_no_other_is_written(index, sync):
    rb = td_buffer(batch_size=4, sync=sync)
    rb.sample()
    with pytest.raises(ValueError, match="holds 8 slots: got a record for slot"):
        rb.update_priority(index, 5.0)
    assert leaves(rb) == [1.0] * CAPACITY


@pytest.mark.parametrize("cells", [[[4, 0]], [[0, 2]], [[0, 0], [10**6, 1]], [[-1, 0]]])
def test_the_same_of_a_cell(cells):
    rb = buffer(0, storage=LazyTensorStorage(CAPACITY, ndim=2))
    rb.extend(torch.arange(8).reshape(2, 4))  # four slots of two cells
    rb.update_priority(torch.tensor([[3, 1]]), 2.0)
    for index in (torch.tensor(cells), tuple(torch.tensor(cells).unbind(-1))):
        with pytest.raises(ValueError, match="needs cells inside of the storage"):
            rb.update_priority(index, 5.0)
    with pytest.raises(ValueError, match="holds 8 slots"):
        rb.update_priority(torch.tensor([8]), 5.0)
    assert leaves(rb) == [1.0] * 7 + [2.0]


# ------------------------------------------------------------------ two storages over one memory


def tracked(storage):
    return TensorDictReplayBuffer(storage=storage, track_generations=True, batch_size=4)


def refused(storage, where):
    with pytest.raises(ValueError, match=f"needs a storage with memory of its own: .*{where}"):
        tracked(storage)
    # The buffer is as TorchRL's, and the storage too, without tracking.
    plain = TensorDictReplayBuffer(storage=storage, batch_size=4)
    assert plain._table is None


def test_a_second_storage_over_the_same_tensordict_is_refused():
    records = ids(range(CAPACITY))
    rb = tracked(TensorStorage(records))
    refused(TensorStorage(records), "the same tensors")
    refused(TensorStorage(records[2:4]), "the same tensors")
    refused(TensorStorage(TensorDict({"other": records["id"].view(2, 4)}, [2])), "the same tensors")
    assert rb.sample()["index_generation"].tolist() == [0] * 4


def test_a_second_storage_over_the_same_tensor_is_refused():
    records = torch.arange(CAPACITY)
    rb = ReplayBuffer(storage=TensorStorage(records), track_generations=True)
    refused(TensorStorage(records), "the same tensors")
    assert len(rb) == CAPACITY


def test_parts_of_a_tensordict_that_do_not_meet_may_have_a_storage_each():
    records = ids(range(CAPACITY))
    first, second = tracked(TensorStorage(records[:4])), tracked(TensorStorage(records[4:]))
    first.extend(ids([100]))
    assert second[:]["id"].tolist() == [4, 5, 6, 7]


def test_a_second_storage_over_the_same_files_is_refused(tmp_path):
    ids(range(CAPACITY)).memmap(tmp_path)
    rb = tracked(TensorStorage(TensorDict.load_memmap(tmp_path)))
    refused(TensorStorage(TensorDict.load_memmap(tmp_path)), "the file .*id.memmap")
    assert len(rb) == CAPACITY


@pytest.mark.parametrize("records", [0, CAPACITY])
def test_a_second_storage_with_the_same_scratch_folder_is_refused(records, tmp_path):
    rb = tracked(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path))
    if records:
        rb.extend(ids(range(records)))
    link = tmp_path.with_name(f"link_{records}")
    link.symlink_to(tmp_path)
    for folder in (tmp_path, link):
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder, existsok=True)
        refused(storage, "the folder")
    assert len(rb) == records


def test_the_memory_of_a_storage_that_is_gone_may_be_used_again(tmp_path):
    rb = tracked(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path, existsok=True))
    rb.extend(ids(range(CAPACITY)))
    gc.disable()
    try:
        del rb
        again = tracked(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path, existsok=True))
    finally:
        gc.enable()
    again.extend(ids([5]))
    assert len(again) == 1


def test_buffers_on_one_storage_object_have_one_table():
    storage = LazyTensorStorage(CAPACITY)
    assert tracked(storage)._table is tracked(storage)._table


def test_a_storage_that_loads_a_dump_or_a_state_has_memory_of_its_own(tmp_path):
    rb = tracked(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage"))
    rb.extend(ids(range(CAPACITY)))
    rb.dumps(tmp_path)
    loaded = []
    for make in (LazyMemmapStorage, LazyTensorStorage):
        loaded += [tracked(make(CAPACITY)), tracked(make(CAPACITY))]
        loaded[-2].loads(tmp_path)
        loaded[-1].load_state_dict(rb.state_dict())
    rb.extend(ids([100]))
    assert [int(other[0]["id"]) for other in loaded] == [0, 0, 0, 0]
    for number, other in enumerate(loaded):
        other.extend(ids([200 + number]))
    assert [int(other[0]["id"]) for other in (rb, *loaded)] == [100, 200, 201, 202, 203]


def test_a_writer_of_a_plain_buffer_on_memory_with_a_table_is_refused_when_it_tracks():
    records = ids(range(CAPACITY))
    rb = tracked(TensorStorage(records))
    plain = ReplayBuffer(storage=TensorStorage(records))
    with pytest.raises(ValueError, match="memory of its own"):
        plain.set_writer(RoundRobinWriter(track_generations=True))
    assert plain._table is None
    assert len(rb) == CAPACITY


# ------------------------------------------------------------------ counters that are used up


@pytest.mark.parametrize("room", [0, 1, 3])
@pytest.mark.parametrize("call", ["load_state_dict", "loads", "set_storage"])
def test_counters_that_are_used_up_are_told_before_anything_changes(call, room, tmp_path):
    rb = td_buffer(batch_size=4)
    rb.dumps(tmp_path / "dump")
    state = copy.deepcopy(rb.state_dict())
    rb.extend(ids([100]))
    former = rb.storage
    base = rb._table.counters.base = 2**62 - room * 2**BASE_BITS - 1
    rb.extend(ids([101]))
    held, tree = handles(rb), leaves(rb)
    other = LazyTensorStorage(CAPACITY)
    SlotGenerations.attach(other).counters.base = base
    if call == "set_storage" and room:
        rb.set_storage(other)
        return
    calls = {**SECOND, "set_storage": lambda *_: rb.set_storage(other)}
    with pytest.raises(OverflowError, match="counters of this storage are used up"):
        calls[call](rb, state, tmp_path / "dump")
    assert rb.storage is former
    assert rb[:]["id"].tolist() == [100, 101, *range(2, 8)]
    assert rb._table.is_live(**held).tolist() == [True] * CAPACITY
    assert leaves(rb) == tree
    assert rb._table.counters.base == base


@pytest.mark.parametrize("how", ["load_state_dict", "loads"])
def test_what_a_buffer_saves_after_thousands_of_restores_can_be_loaded(how, tmp_path):
    rb = td_buffer(batch_size=4)
    rb._table.counters.base = 2**62 - 8 * 2**BASE_BITS
    rb.extend(ids(range(CAPACITY)))
    held = handles(rb)
    assert held["generation"].min() > 2**61
    rb.dumps(tmp_path / "dump")
    state = copy.deepcopy(rb.state_dict())
    for resumed in (td_buffer(0), rb):
        SECOND[how](resumed, state, tmp_path / "dump")
        assert resumed._table.is_live(**held).tolist() == [True] * CAPACITY


def test_the_last_restore_that_is_begun_has_room_to_fail():
    rb = td_buffer(batch_size=4)
    state = copy.deepcopy(rb.state_dict())
    rb._table.counters.base = 2**62 - 4 * 2**BASE_BITS - 1
    held = handles(rb)
    rb.storage.load_state_dict, inner = None, rb.storage.load_state_dict
    with pytest.raises(TypeError, match="not callable"):
        rb.load_state_dict(state)
    rb.storage.load_state_dict = inner
    assert rb._table.is_live(**held).tolist() == [False] * CAPACITY
