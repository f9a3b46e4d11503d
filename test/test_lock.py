from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading

import pytest
import torch
from common import Thread, buffer
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import ReplayBuffer, SlotGenerations
from torchrl.data.replay_buffers.generations.lock import StorageLock


def test_it_is_reentrant_and_excludes_other_threads():
    lock = StorageLock()
    with lock, lock:
        assert Thread(lambda: lock.acquire(block=False)).join() is False
        assert Thread(lambda: lock.acquire(timeout=0.01)).join() is False
        assert Thread(lambda: lock.acquire(timeout=-1)).join() is False
    assert Thread(lambda: (lock.acquire(timeout=0.01), lock.release())[0]).join() is True


def test_a_waiter_gets_it_when_the_last_hold_is_released():
    lock = StorageLock()
    lock.acquire()
    lock.acquire()
    waiting = Thread(lambda: (lock.acquire(), lock.release())[0])
    lock.release()
    assert waiting.is_alive()
    lock.release()
    assert waiting.join() is True


def test_releasing_a_lock_that_is_not_held_is_an_error():
    with pytest.raises(RuntimeError):
        StorageLock().release()


def test_a_copy_has_a_lock_of_its_own():
    lock = StorageLock()
    for other in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert other.order != lock.order
        with lock:
            assert Thread(lambda other=other: other.acquire(block=False)).join() is True


@pytest.mark.parametrize("shares", [0, 1, 2])
def test_every_buffer_on_a_storage_has_its_one_lock_however_often_it_is_shared(shares):
    storage = LazyTensorStorage(8)
    tracking = buffer(storage=storage)
    plain = ReplayBuffer(storage=storage)
    for _ in range(shares):
        tracking.share()
        plain.share()
    lock = SlotGenerations.attach(storage).lock
    assert tracking._write_lock is lock
    assert plain._write_lock is lock
    tracking.share(False)
    assert tracking._write_lock is lock


def test_a_buffer_made_before_the_table_takes_its_lock_too():
    storage = LazyTensorStorage(8)
    plain = ReplayBuffer(storage=storage)
    assert plain._table is None
    tracking = buffer(storage=storage)
    assert plain._write_lock is tracking._write_lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_refused_at_its_first_use():
    rb = buffer()

    def child(pipe):
        for use in (lambda: rb.add(torch.tensor(1)), lambda: rb.sample(2), rb.empty):
            try:
                use()
            except RuntimeError as error:
                pipe.send(str(error))
            else:
                pipe.send("not refused")

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    try:
        messages = [ours.recv() if ours.poll(20) else "no answer" for _ in range(3)]
    finally:
        process.join(20)
    assert process.exitcode == 0
    assert all("forked process" in message for message in messages), messages
    rb.add(torch.tensor(1))  # the parent's lock is as it was


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_the_lock_is_held_ends_normally():
    lock = StorageLock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    holder = Thread(hold)
    held.wait(20)
    process = multiprocessing.get_context("fork").Process(target=_must_be_refused, args=(lock,))
    process.start()
    process.join(20)
    done.set()
    holder.join()
    assert process.exitcode == 0


def _must_be_refused(lock):
    with pytest.raises(RuntimeError, match="forked process"):
        lock.acquire(timeout=5)
