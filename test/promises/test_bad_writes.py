"""Records that can't be written: all or nothing, as far as that can be known beforehand."""

from __future__ import annotations

import pytest
import torch
from common import CAPACITY, buffer, handles, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

NAN, INF = float("nan"), float("inf")


def records(rows, **columns):
    """Records of an id, a vector and a nested image, and whatever is given in their place."""
    data = {
        "id": torch.arange(rows) + 100,
        "vector": torch.ones(rows, 3),
        "nested": {"image": torch.ones(rows, 2, 2, dtype=torch.uint8)},
        **columns,
    }
    return TensorDict({key: value for key, value in data.items() if value is not None}, [rows])


def state_of(rb):
    storage = rb.storage
    return {
        "records": {
            str(key): value.tolist() for key, value in storage._storage[: len(rb)].items(True, True)
        },
        "leaves": leaves(rb),
        "stamps": rb._table.stamps.tolist(),
        "cursor": (rb.writer._cursor, rb.writer._write_count),
        "length": len(storage),
    }


METHODS = {
    "extend": lambda rb, data: rb.extend(data),
    "add": lambda rb, data: rb.add(data[0]),
    "rb[i] =": lambda rb, data: rb.__setitem__(2, data[0]),
    "rb[index] =": lambda rb, data: rb.__setitem__(torch.tensor([1, 4]), data),
    "rb[slice] =": lambda rb, data: rb.__setitem__(slice(1, 3), data),
    "write_at": lambda rb, data: rb.writer.write_at(torch.tensor([1, 4]), data),
    "write_at of one": lambda rb, data: rb.writer.write_at(7, data[0]),
    "writer.extend": lambda rb, data: rb.writer.extend(data),
}
BAD = {
    "a longer vector": records(2, vector=torch.ones(2, 4)),
    "a shorter vector": records(2, vector=torch.ones(2, 2)),
    "no vector but a matrix": records(2, vector=torch.ones(2, 3, 3)),
    "a nested image of another shape": records(
        2, nested={"image": torch.ones(2, 2, 3, dtype=torch.uint8)}
    ),
    "a tensor in place of the nested": records(2, nested=torch.ones(2)),
    "a tensordict in place of the vector": records(2, vector={"image": torch.ones(2)}),
}


@pytest.mark.parametrize("length", [CAPACITY, 5])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("bad", list(BAD))
@pytest.mark.parametrize("method", list(METHODS))
def test_records_that_do_not_go_into_the_storage_change_nothing(method, bad, storage, length):
    rb = td_buffer(0, storage=storage(CAPACITY))
    rb.extend(records(length))
    held = handles(rb, range(length))
    rb.update_priority_if_present(**held, priority=torch.arange(2.0, 2 + length))
    before = state_of(rb)
    with pytest.raises((ValueError, KeyError)):
        METHODS[method](rb, BAD[bad])
    assert state_of(rb) == before
    assert rb._table.is_live(**held).tolist() == [True] * length


@pytest.mark.parametrize("other", [{"vector": None}, {"nested": None}, {"more": torch.ones(2)}])
@pytest.mark.parametrize("method", list(METHODS))
def test_records_of_other_keys_are_written_as_torchrl_writes_them(method, other):
    rb = td_buffer(0)
    rb.extend(records(CAPACITY))
    held = handles(rb)
    METHODS[method](rb, records(2, **other))
    live = rb._table.is_live(**held)
    assert 1 <= int((~live).sum()) <= 2
    assert set(map(str, rb[:].keys(True))) >= set(map(str, records(1).keys(True)))
    assert rb[:]["vector"].eq(1).all()


TENSORS = {
    "extend": lambda rb, data: rb.extend(data),
    "add": lambda rb, data: rb.add(data[0]),
    "rb[i] =": lambda rb, data: rb.__setitem__(2, data[0]),
    "rb[index] =": lambda rb, data: rb.__setitem__(torch.tensor([1, 4]), data),
    "write_at": lambda rb, data: rb.writer.write_at(torch.tensor([1, 4]), data),
}


@pytest.mark.parametrize("bad", [torch.ones(2, 4), torch.ones(2, 3, 3), records(2)], ids=repr)
@pytest.mark.parametrize("method", list(TENSORS))
def test_the_same_of_plain_tensors(method, bad):
    rb = buffer(0)
    rb.extend(torch.zeros(CAPACITY, 3))
    held = handles(rb)
    rb.update_priority_if_present(**held, priority=torch.arange(2.0, 10))
    stamps, tree = rb._table.stamps.clone(), leaves(rb)
    with pytest.raises((ValueError, TypeError)):
        TENSORS[method](rb, bad)
    assert rb[:].eq(0).all()
    assert rb._table.stamps.equal(stamps)
    assert leaves(rb) == tree
    assert (rb.writer._cursor, len(rb)) == (0, CAPACITY)


@pytest.mark.parametrize(
    "brings",
    [[1.0, NAN], [INF, 1.0], [1.0, -3.0], [[[1.0], [NAN], [2.0]]] * 2],
    ids=repr,
)
@pytest.mark.parametrize("method", ["extend", "add"])
def test_records_that_bring_a_priority_out_of_range_change_nothing(method, brings):
    rb = td_buffer(0, batch_size=4)
    error = torch.ones(CAPACITY, *torch.tensor(brings).shape[1:])
    rb.extend(records(CAPACITY, td_error=error))
    before = state_of(rb)
    data = records(2, td_error=torch.tensor(brings))
    rows = [data] if method == "extend" else [data[1:], data[:1]]
    raised = 0
    for part in rows:
        try:
            METHODS[method](rb, part)
        except ValueError:
            raised += 1
        else:  # the row whose own priority is in range
            assert part["td_error"].isfinite().all()
            assert part["td_error"].min() >= 0
            before = state_of(rb)
        assert state_of(rb) == before
    assert raised >= 1
    assert rb.sample()["index_generation"].min() >= 0


def test_records_that_bring_several_priorities_each_are_written_with_the_largest():
    rb = td_buffer(0)
    rb.extend(records(2, td_error=torch.tensor([[[1.0], [4.0], [2.0]], [[3.0], [1.0], [2.0]]])))
    assert leaves(rb) == [4, 3, 0, 0, 0, 0, 0, 0]
