"""What a signal handler may do in the middle of a call of its own thread.

A handler runs between two steps of the call. Here a hook at that line calls what it would call.
"""

from __future__ import annotations

import copy
import pickle
import signal

import pytest
import torch
from common import CAPACITY, handles, ids, leaves, td_buffer
from torchrl.data.replay_buffers.generations.buffers import updates
from torchrl.data.replay_buffers.generations.core import update as update_module


def in_the_middle_of_a_write(rb, monkeypatch, handler):
    """Extends the buffer by two records, between whose stamps and data a handler runs."""
    put = type(rb.writer)._put_pairs

    def interrupted(writer, *args):
        handler()
        put(writer, *args)

    monkeypatch.setattr(type(rb.writer), "_put_pairs", interrupted)
    return rb.extend(ids([100, 101]), return_generation=True)


REFUSED = {
    "extend": lambda rb, path: rb.extend(ids([7])),
    "add": lambda rb, path: rb.add(ids([7])[0]),
    "write_at": lambda rb, path: rb.writer.write_at(torch.tensor([3]), ids([7])),
    "writer": lambda rb, path: rb.writer.extend(ids([7])),
    "assignment": lambda rb, path: rb.__setitem__(3, ids([7])[0]),
    "empty": lambda rb, path: rb.empty(),
    "dumps": lambda rb, path: rb.dumps(path),
    "state_dict": lambda rb, path: rb.state_dict(),
    "load_state_dict": lambda rb, path: rb.load_state_dict(td_buffer().state_dict()),
    "deepcopy": lambda rb, path: copy.deepcopy(rb),
    "pickle": lambda rb, path: pickle.dumps(rb),
    "update": lambda rb, path: rb.update_priority_if_present(**handles(rb), priority=5.0),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_would_go_wrong_in_a_write_is_refused_and_the_write_is_whole(
    call, monkeypatch, tmp_path
):
    rb = td_buffer()
    refusals = []

    def handler():
        with pytest.raises(RuntimeError, match="a write of this thread is under way") as refusal:
            call(rb, tmp_path)
        refusals.append(refusal)

    index, generation = in_the_middle_of_a_write(rb, monkeypatch, handler)
    assert len(refusals) == 1
    assert (index.tolist(), generation.tolist()) == ([0, 1], [1, 1])
    assert rb[:]["id"].tolist() == [100, 101, 2, 3, 4, 5, 6, 7]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    call(rb, tmp_path)  # afterwards it works


def test_a_sample_in_a_write_has_no_live_handle_on_what_is_written_and_looks_are_right(
    monkeypatch,
):
    rb = td_buffer(batch_size=64)
    before = handles(rb)
    seen = {}

    def handler():
        seen["sample"] = rb.sample()
        seen["live"] = rb._table.is_live(**before).tolist()
        seen["stats"] = rb.stats()["size"]

    in_the_middle_of_a_write(rb, monkeypatch, handler)
    sample = seen["sample"]
    torn = sample["index"] < 2
    assert torn.any()
    assert ((sample["index_generation"] == -1) == torn).all()
    assert (
        rb._table.is_live(sample["index"], sample["index_generation"]).tolist() == (~torn).tolist()
    )
    assert seen["live"] == [False] * 2 + [True] * 6
    assert seen["stats"] == CAPACITY


def test_a_write_between_the_comparison_and_the_priorities_is_refused(monkeypatch):
    rb = td_buffer()
    write, refusals = update_module.write_priority, []

    def interrupted(*args):
        with pytest.raises(RuntimeError, match="under way") as refusal:
            rb.extend(ids(range(100, 108)))
        refusals.append(refusal)
        write(*args)

    monkeypatch.setattr(update_module, "write_priority", interrupted)
    result = rb.update_priority_if_present(**handles(rb), priority=torch.arange(2.0, 10.0))
    assert len(refusals) == 1
    assert result.num_updated == 8
    assert leaves(rb) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert rb[:]["id"].tolist() == list(range(8))


def test_a_write_before_the_priorities_that_records_bring_is_refused(monkeypatch):
    rb = td_buffer()
    brought, refusals = updates.write_brought, []

    def interrupted(*args):
        with pytest.raises(RuntimeError, match="under way") as refusal:
            rb.extend(ids([7]))
        refusals.append(refusal)
        brought(*args)

    monkeypatch.setattr(updates, "write_brought", interrupted)
    rb.extend(ids([100, 101], td_error=torch.tensor([5.0, 6.0])))
    assert len(refusals) == 1
    assert leaves(rb)[:3] == [5, 6, 1]


def test_a_write_in_the_middle_of_a_dump_or_a_restore_is_refused(monkeypatch, tmp_path):
    rb = td_buffer()
    state = copy.deepcopy(rb.state_dict())
    refusals = []

    def interrupt(step):
        def interrupted(*args, **kwargs):
            with pytest.raises(RuntimeError, match="under way") as refusal:
                rb.extend(ids([7]))
            refusals.append(refusal)
            return step(*args, **kwargs)

        return interrupted

    for name in ("dumps", "loads", "load_state_dict"):
        monkeypatch.setattr(rb.sampler, name, interrupt(getattr(rb.sampler, name)))
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    rb.load_state_dict(state)
    assert len(refusals) == 3
    assert rb[:]["id"].tolist() == list(range(8))
    rb.extend(ids([7]))  # afterwards it works


def test_a_signal_handler_gets_the_refusal_and_the_flag_way_works(monkeypatch, tmp_path):
    rb = td_buffer()
    asked, refusals = [], []

    def handler(number, frame):
        asked.append(number)
        try:
            rb.dumps(tmp_path)
        except RuntimeError as error:
            refusals.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        in_the_middle_of_a_write(rb, monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == [signal.SIGUSR1]
    assert len(refusals) == 1
    assert "let it set a flag" in refusals[0]
    if asked:  # as the loop does after the write
        rb.dumps(tmp_path)
    fresh = td_buffer(0)
    fresh.loads(tmp_path)
    assert fresh[:]["id"].tolist() == [100, 101, 2, 3, 4, 5, 6, 7]
