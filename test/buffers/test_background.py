"""Priority updates in the background: their order, and where their errors go."""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch
from common import CAPACITY, PER, Thread, buffer, handles, ids, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
)

# How long something that must wait is given to prove that it does not.
GRACE = 0.2
# How long something that must happen may take.
PATIENCE = 30


class Gate:
    """Holds whoever calls it, once, until it is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, data=None):
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return data


@pytest.fixture
def updates_held(monkeypatch):
    """A gate before every background update of one buffer."""

    def hold(rb):
        gate, inner = Gate(), rb.update_priority_if_present

        def held(**kwargs):
            gate()
            return inner(**kwargs)

        monkeypatch.setattr(rb, "update_priority_if_present", held)
        return gate

    return hold


def submit(rb, index, priority):
    """Submits what is no tensor, and so always left to the background thread."""
    return rb.submit_update_priority_if_present(**handles(rb, index), priority=priority)


def test_future_gives_the_result_of_the_update():
    rb = buffer()
    held = handles(rb)
    rb.extend(torch.arange(8, 11))
    future = rb.submit_update_priority_if_present(**held, priority=torch.arange(20.0, 28.0))
    assert future.result(PATIENCE).updated_mask.tolist() == [False] * 3 + [True] * 5
    assert leaves(rb) == [1, 1, 1, 23, 24, 25, 26, 27]


def test_learner_goes_on_while_the_update_waits_for_the_lock():
    rb = buffer()
    with rb._table.lock:
        future = submit(rb, [0], [5.0])
        with pytest.raises(FutureTimeoutError):
            future.result(GRACE)
    assert future.result(PATIENCE).num_updated == 1


def test_record_overwritten_between_submission_and_update_is_stale(updates_held):
    rb = buffer()
    gate = updates_held(rb)
    future = submit(rb, [0, 1, 2], [5.0, 6.0, 7.0])
    assert gate.reached.wait(PATIENCE)
    rb.extend(torch.arange(8, 10))
    gate.opened.set()
    assert future.result(PATIENCE).updated_mask.tolist() == [False, False, True]
    assert leaves(rb) == [1, 1, 7, 1, 1, 1, 1, 1]


def test_updates_run_in_the_order_of_their_submission():
    rb = buffer()
    with rb._table.lock:
        for priority in range(1, 101):
            submit(rb, [0], [float(priority)])
    rb.synchronize()
    assert leaves(rb) == [100, 1, 1, 1, 1, 1, 1, 1]


def test_patches_of_torchrl_and_priorities_run_in_one_order():
    rb = td_buffer()
    order = []
    inner_patch, inner_priority = rb.update_if_present, rb.update_priority_if_present
    rb.update_if_present = lambda **kwargs: order.append("patch") or inner_patch(**kwargs)
    rb.update_priority_if_present = lambda **kwargs: (
        order.append("priority") or inner_priority(**kwargs)
    )
    with rb._table.lock:
        for _ in range(10):
            submit(rb, [0], [2.0])
            rb.submit_update_if_present(**handles(rb, [0]), patch={"id": torch.tensor([50])})
    rb.synchronize()
    assert order == ["priority", "patch"] * 10


def with_a_sample_under_way(prefetch):
    """A buffer whose background thread samples, and the gate that holds it there."""
    gate = Gate()
    rb = buffer(prefetch=prefetch, batch_size=4, transform=gate)
    gate.opened.set()
    rb.sample()
    rb.synchronize()
    gate.opened.clear()
    gate.reached.clear()
    rb.sample()  # takes a batch from the queue, and another begins
    assert gate.reached.wait(PATIENCE)
    return rb, gate


def test_update_runs_after_the_samples_that_were_prefetched():
    rb, gate = with_a_sample_under_way(prefetch=2)
    future = submit(rb, range(CAPACITY), 5.0)
    with pytest.raises(FutureTimeoutError):
        future.result(GRACE)
    assert leaves(rb) == [1] * 8
    gate.opened.set()
    assert future.result(PATIENCE).num_updated == 8


@pytest.mark.parametrize("prefetch", [None, 2])
def test_samples_asked_for_later_wait_for_the_update(prefetch, updates_held):
    rb = buffer(prefetch=prefetch, batch_size=4)
    gate = updates_held(rb)
    if prefetch:
        rb.sample()  # fills the queue
        rb.synchronize()
    future = submit(rb, range(CAPACITY), [1e-9] * 7 + [1e6])
    assert gate.reached.wait(PATIENCE)
    for _ in range(prefetch or 0):
        rb.sample()  # drawn before the update, and returned without waiting for it
    later = Thread(rb.sample)
    later.join_briefly(GRACE)
    assert later.is_alive()
    gate.opened.set()
    assert later.join().tolist() == [7, 7, 7, 7]
    assert future.done()


def test_asynchronous_learners_update_in_the_background_too():
    rb = td_buffer(storage=LazyTensorStorage(CAPACITY), sync=False)
    future = submit(rb, [1, 3], [5.0, 6.0])
    assert future.result(PATIENCE).num_updated == 2
    assert rb.prioritized_sampler._sum_tree[[0, 1, 2, 3]].tolist() == [1, 5, 1, 6]


def test_ensembles_update_in_the_background_and_their_samples_wait(updates_held):
    members = [td_buffer(), td_buffer()]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    gate = updates_held(ensemble)
    index = TensorDict({"buffer_ids": torch.tensor([0, 1, 1]), "index": torch.arange(3)}, [3])
    generation = ensemble.writer.generations_of(index)
    members[1].extend(ids([8, 9]))
    future = ensemble.submit_update_priority_if_present(
        index=index, generation=generation, priority=[5.0, 6.0, 7.0]
    )
    later = Thread(ensemble.sample)
    later.join_briefly(GRACE)
    assert later.is_alive()
    gate.opened.set()
    later.join()
    assert future.result(PATIENCE).updated_mask.tolist() == [True, False, True]
    assert [leaves(member)[:3] for member in members] == [[5, 1, 1], [1, 1, 7]]


# ------------------------------------------------------------------ the end, and errors


@pytest.mark.parametrize("wait", ["synchronize", "shutdown"])
def test_synchronize_and_shutdown_wait_for_the_update(wait, updates_held):
    rb = buffer()
    gate = updates_held(rb)
    future = submit(rb, [0], [5.0])
    waiting = Thread(getattr(rb, wait))
    waiting.join_briefly(GRACE)
    assert waiting.is_alive()
    gate.opened.set()
    waiting.join()
    assert future.done()
    assert leaves(rb)[0] == 5


def test_state_dict_waits_for_the_update(updates_held):
    rb = buffer()
    gate = updates_held(rb)
    submit(rb, [0], [5.0])
    saving = Thread(rb.state_dict)
    saving.join_briefly(GRACE)
    assert saving.is_alive()
    gate.opened.set()
    restored = buffer()
    restored.load_state_dict(saving.join())
    assert leaves(restored)[0] == 5


def test_a_buffer_that_was_shut_down_takes_no_update():
    rb = buffer()
    held = handles(rb)
    rb.shutdown()
    with pytest.raises(RuntimeError, match="needs a buffer that is alive: this one was shut down"):
        rb.submit_update_priority_if_present(**held, priority=1.0)


def submit_a_bad_one(rb):
    future = submit(rb, [0, 1], [5.0, -1.0])
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite, not negative.* got -1\.0"):
        future.result(PATIENCE)
    return future


@pytest.mark.parametrize("call", ["synchronize", "shutdown", "sample"])
def test_error_reaches_whoever_calls_the_buffer_next(call):
    rb = buffer(batch_size=4)
    submit_a_bad_one(rb)
    assert leaves(rb) == [1] * 8
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite"):
        getattr(rb, call)()


def test_error_reaches_a_prefetched_sample():
    rb = buffer(batch_size=4, prefetch=1)
    submit_a_bad_one(rb)
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite"):
        rb.sample()


def test_error_is_raised_once_by_the_next_submission():
    rb = buffer(batch_size=4)
    submit_a_bad_one(rb)
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite"):
        submit(rb, [2], [6.0])
    assert leaves(rb) == [1] * 8
    rb.sample()
    assert submit(rb, [2], [6.0]).result(PATIENCE).num_updated == 1
    rb.shutdown()
    assert leaves(rb) == [1, 1, 6, 1, 1, 1, 1, 1]


def test_prefetched_sample_that_fails_leaves_the_update_alone():
    def fail_later(data):
        samples.append(data)
        if len(samples) > 1:
            raise OSError("the transform failed")
        return data

    samples: list = []
    rb = buffer(batch_size=4, prefetch=1, transform=fail_later)
    rb.sample()
    assert submit(rb, [1], [5.0]).result(PATIENCE).num_updated == 1
    with pytest.raises(OSError, match="the transform failed"):
        rb.sample()


def test_update_behind_one_that_fails_is_made_all_the_same():
    rb = buffer()
    with rb._table.lock:
        bad = submit(rb, [0], [-1.0])
        good = submit(rb, [1], [5.0])
    assert good.result(PATIENCE).num_updated == 1
    with pytest.raises(ValueError, match="priority"):
        bad.result(PATIENCE)
    with pytest.raises(ValueError, match="priority"):
        rb.synchronize()
    assert leaves(rb) == [1, 5, 1, 1, 1, 1, 1, 1]


def submit_two_bad_ones(rb):
    with rb._table.lock:
        futures = [submit(rb, [0], [-1.0]), submit(rb, [1], [-2.0]), submit(rb, [2], [6.0])]
    assert futures[2].result(PATIENCE).num_updated == 1
    return [future.exception(PATIENCE) for future in futures[:2]]


def traceback_of(error):
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("call", ["synchronize", "shutdown", "state_dict"])
def test_each_error_of_updates_that_nobody_asked_is_told_once(call):
    rb = buffer()
    errors = submit_two_bad_ones(rb)
    with pytest.raises(ValueError, match=r"got -1\.0") as told:
        getattr(rb, call)()
    assert told.value is errors[0]
    assert told.value.__context__ is errors[1]
    assert "got -1.0" in traceback_of(told.value)
    assert "got -2.0" in traceback_of(told.value)
    rb.synchronize()  # nothing is left to tell
    assert leaves(rb) == [1, 1, 6, 1, 1, 1, 1, 1]


def test_submissions_tell_one_error_each():
    rb = buffer()
    submit_two_bad_ones(rb)
    for told in (r"got -1\.0", r"got -2\.0"):
        with pytest.raises(ValueError, match=told):
            submit(rb, [3], [7.0])
    assert submit(rb, [3], [7.0]).result(PATIENCE).num_updated == 1
    rb.shutdown()


def test_the_error_of_a_patch_that_waited_for_a_failed_update_is_that_of_the_update():
    rb = td_buffer()
    with rb._table.lock:
        submit(rb, [0], [-1.0])
        rb.submit_update_if_present(**handles(rb, [0]), patch={"id": torch.tensor([5])})
    with pytest.raises(ValueError, match=r"got -1\.0") as told:
        rb.synchronize()
    assert told.value.__context__ is None


# ------------------------------------------------------------------ small ones, made at once


def submit_small(rb, index, priority):
    return submit(rb, index, torch.tensor(priority))


def test_small_update_is_made_at_once_if_nothing_stands_before_it():
    rb = buffer()
    future = submit_small(rb, [0, 1], [5.0, 6.0])
    assert future.done()
    assert future.result().num_updated == 2
    assert leaves(rb) == [5, 6, 1, 1, 1, 1, 1, 1]
    assert rb._update_executor is None  # no thread has seen it


def test_large_update_is_left_to_the_background_thread():
    rb = PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(4), track_generations=True)
    rb.extend(torch.arange(4))
    index = torch.zeros(1025, dtype=torch.int64)
    priority = torch.ones(1025)
    future = rb.submit_update_priority_if_present(index=index, generation=index, priority=priority)
    assert rb._update_executor is not None
    assert future.result(PATIENCE).num_updated == 1025


def test_small_update_waits_in_the_background_for_the_lock():
    rb = buffer()
    gate, held = Gate(), handles(rb, [0])

    def hold():
        with rb._table.lock:
            gate()

    holder = Thread(hold)
    assert gate.reached.wait(PATIENCE)
    futures = [
        rb.submit_update_priority_if_present(**held, priority=torch.tensor([float(priority)]))
        for priority in range(1, 11)
    ]
    with pytest.raises(FutureTimeoutError):
        futures[0].result(GRACE)
    gate.opened.set()
    holder.join()
    rb.synchronize()
    assert leaves(rb)[0] == 10


def test_small_update_comes_after_a_large_one_that_is_under_way(updates_held):
    rb = buffer()
    gate = updates_held(rb)
    first = submit(rb, [0], [5.0])
    assert gate.reached.wait(PATIENCE)
    second = submit_small(rb, [0], [6.0])
    assert not first.done()
    assert not second.done()
    gate.opened.set()
    assert second.result(PATIENCE).num_updated == 1
    assert leaves(rb)[0] == 6


def test_small_update_runs_after_the_samples_that_were_prefetched():
    rb, gate = with_a_sample_under_way(prefetch=1)
    future = submit_small(rb, [0], [5.0])
    with pytest.raises(FutureTimeoutError):
        future.result(GRACE)
    assert leaves(rb)[0] == 1
    gate.opened.set()
    assert future.result(PATIENCE).num_updated == 1


def test_error_of_a_small_update_is_raised_as_that_of_any():
    rb = buffer(batch_size=4)
    future = submit_small(rb, [0, 1], [5.0, -1.0])
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite"):
        future.result()
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite"):
        submit_small(rb, [2], [6.0])
    assert leaves(rb) == [1] * 8
    assert submit_small(rb, [2], [6.0]).result().num_updated == 1


# ------------------------------------------------------------------ what is refused


def without_priorities():
    return ReplayBuffer(storage=LazyTensorStorage(4), track_generations=True)


def without_stamps():
    return PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(4))


@pytest.mark.parametrize(
    ("make", "needs"), [(without_priorities, "priorities"), (without_stamps, "stamps")]
)
def test_what_no_update_can_do_is_refused_at_submission(make, needs):
    with pytest.raises(RuntimeError, match=rf"^submit_update_priority\w*\(\) needs {needs}"):
        make().submit_update_priority_if_present(index=[0], generation=[0], priority=1.0)


# ------------------------------------------------------------------ CUDA

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_inputs_are_read_where_the_stream_stood_at_submission(device):
    rb = td_buffer(0, storage=LazyTensorStorage(CAPACITY, device=device))
    rb.extend(ids(range(CAPACITY)).to(device))
    held = {name: value.cuda() for name, value in handles(rb).items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        priority = torch.arange(1.0, 9.0, device="cuda")
        torch.cuda._sleep(100_000_000)
        priority += 10
        future = rb.submit_update_priority_if_present(**held, priority=priority)
        assert not future.done()  # the submission did not wait for the stream
        torch.cuda._sleep(2_000_000_000)  # about a second of the next step
        priority.zero_()
        assert future.result(PATIENCE).num_updated == 8
        assert not stream.query()  # nor did the update wait for what came later
    assert leaves(rb) == [11, 12, 13, 14, 15, 16, 17, 18]
