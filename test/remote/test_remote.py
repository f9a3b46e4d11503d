"""Buffers in a Ray actor: the calls, the actors that die, and all at once."""

from __future__ import annotations

import contextlib
import doctest
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections import deque
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, ids, leaves, readme_example
from launched import installed
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    RayReplayBuffer,
    ReplayBufferTrainer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations.buffers import services
from torchrl.data.replay_buffers.generations.remote import ray as our_ray

ray = pytest.importorskip("ray")

PATIENCE = 60
SLOTS = 256
LATE = 3  # batches between a sample and its update
DEFAULT = 2.0**24  # the priority of a record that nobody has updated: above each id


# ------------------------------------------------------------------ the cluster and its buffers


def descendants(pid: int) -> set[int]:
    """The processes below a process, in /proc's terms."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster():
    """A local Ray cluster that leaves no process and no file behind."""
    resource_tracker.ensure_running()  # of multiprocessing: it is ours, and stays
    before = descendants(os.getpid())
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path must be short
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[1]}")
        environment.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes into the home folder
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        started = descendants(os.getpid()) - before
        ray.shutdown()
    assert started
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    assert [pid for pid in started if alive(pid)] == []


class Watched(TensorDictPrioritizedReplayBuffer):
    """Records have an id, and updates write ``id + 1``: so a priority tells whose it is."""

    misapplied = 0

    def leaves(self):
        return leaves(self)

    def misapplied_in(self, slots):
        """How many records of these slots have the priority of another record."""
        found = torch.tensor(leaves(self))[slots]
        own = self.storage[:]["id"][slots] + 1
        return int(((found != own) & (found != DEFAULT)).sum())

    def extend(self, data, **kwargs):
        with self._table.lock:
            if len(self) == SLOTS:  # what leaves is looked at for the last time
                slots = (torch.arange(len(data)) + self.writer._cursor) % SLOTS
                self.misapplied += self.misapplied_in(slots)
            return super().extend(data, **kwargs)

    def begin_again(self):
        self.empty()
        self.extend(ids(range(SLOTS)))
        self.update_priority(torch.arange(SLOTS), torch.full((SLOTS,), DEFAULT))
        self.misapplied = 0

    def all_misapplied(self):
        with self._table.lock:
            return self.misapplied + self.misapplied_in(torch.arange(SLOTS))


def make(cls=Watched, slots=CAPACITY, batch_size=4, transport="ray", **remote_config):
    return cls(
        service_backend="ray",
        service_backend_options={"remote_config": {"num_cpus": 0, **remote_config}},
        transport=transport,
        **PER,
        storage=partial(LazyTensorStorage, slots),
        batch_size=batch_size,
        track_generations=True,
    )


@pytest.fixture(scope="module", params=["ray", "distributed"])
def shared_rb(cluster, request):
    rb = make(transport=request.param)
    rb.extend(ids(range(8)))  # the "distributed" transport learns the layout
    yield rb
    rb.shutdown()


@pytest.fixture
def rb(shared_rb):
    """A buffer in an actor, with records 0 to 7 and the default priority 1."""
    shared_rb.empty()
    shared_rb.extend(ids(range(8)))
    return shared_rb


@pytest.fixture
def own_rb(cluster):
    """Makes buffers whose actors the test may kill."""
    with contextlib.ExitStack() as made:

        def make_own(**kwargs):
            rb = make(**kwargs)
            made.callback(rb.shutdown)
            return rb

        yield make_own


def leaves_of(rb):
    return ray.get(rb._rb.leaves.remote())


def overwrite(rb, values):
    """Any number of records: not through the "distributed" transport, which has learnt another."""
    rb.extend(ids(values), return_generation=True)


def all_handles(rb):
    """Fills the buffer again, and returns the handles of its records."""
    index, generation = rb.extend(ids(range(8)), return_generation=True)
    return {"index": index, "generation": generation}


# ------------------------------------------------------------------ Ray: the calls


def test_extend_and_add_return_handles(rb):
    index, generation = rb.extend(ids(range(20, 23)), return_generation=True)
    assert index.tolist() == [0, 1, 2]
    first = int(generation[0])
    assert generation.tolist() == [first] * 3
    index, generation = rb.add(TensorDict({"id": torch.tensor(23)}, []), return_generation=True)
    assert (int(index), int(generation)) == (3, first)
    assert rb.extend(ids(range(8))).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_priorities_reach_the_records_that_are_still_there(rb):
    held = all_handles(rb)
    overwrite(rb, range(8, 11))
    result = rb.update_priority_if_present(**held, priority=torch.arange(20.0, 28.0))
    assert type(result) is generations.PriorityUpdateResult
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert (result.num_updated, result.num_stale) == (5, 3)
    assert leaves_of(rb) == [1, 1, 1, 23, 24, 25, 26, 27]


def test_a_sample_carries_its_stamps_back(rb):
    sample = rb.sample()
    slots = sample["index"].tolist()
    overwrite(rb, range(8, 12))
    sample["td_error"] = torch.full((4,), 5.0)
    result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == [slot >= 4 for slot in slots]
    assert leaves_of(rb) == [5.0 if slot >= 4 and slot in slots else 1.0 for slot in range(8)]


@pytest.mark.parametrize("index", [[0, 5], (torch.tensor([0, 5]),), torch.tensor([0, 5]).numpy()])
def test_every_kind_of_index_travels(rb, index):
    generation = all_handles(rb)["generation"][[0, 5]]
    result = rb.update_priority_if_present(index=index, generation=generation, priority=3)
    assert result.updated_mask.tolist() == [True, True]
    assert leaves_of(rb) == [3, 1, 1, 1, 1, 3, 1, 1]


def test_comparing_and_writing_take_one_round_trip(rb, monkeypatch):
    held, sample = all_handles(rb), rb.sample()
    sample["td_error"] = torch.ones(4)
    asked = []
    inner = ray.get
    monkeypatch.setattr(
        ray, "get", lambda *args, **kwargs: asked.append(1) or inner(*args, **kwargs)
    )
    rb.update_priority_if_present(**held, priority=1.0)
    assert len(asked) == 1
    rb.update_tensordict_priority_if_present(sample)
    assert len(asked) == 2


def test_bad_priority_is_an_error_and_changes_nothing(rb):
    held = all_handles(rb)
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite, not negative.* got -1\.0"):
        rb.update_priority_if_present(**held, priority=[5.0, -1.0] + [5.0] * 6)
    assert leaves_of(rb) == [1] * 8


def test_sample_without_stamps_is_an_error(rb):
    sample = rb.sample().exclude("index_generation")
    with pytest.raises(KeyError, match="needs 'index_generation' in the sample"):
        rb.update_tensordict_priority_if_present(sample)


def test_background_updates_are_refused(rb):
    with pytest.raises(
        NotImplementedError, match=r"needs a buffer in this process\. Over Ray call"
    ):
        rb.submit_update_priority_if_present(index=[0], generation=[0], priority=1.0)


@pytest.fixture
def update_elsewhere(cluster):
    @ray.remote(num_cpus=0)
    def update(client, held, sample):
        index, _ = client.extend(ids(range(8, 10)), return_generation=True)
        result = client.update_priority_if_present(**held, priority=7.0)
        sampled = client.update_tensordict_priority_if_present(sample)
        return index.tolist(), result.updated_mask.tolist(), sampled.updated_mask.tolist()

    return update


def test_clients_have_the_same_methods_in_another_process(rb, update_elsewhere):
    held, sample = all_handles(rb), rb.sample()
    slots = sample["index"].tolist()
    sample["td_error"] = torch.full((4,), 7.0)
    first, second = rb.clients(2)
    assert ray.get(update_elsewhere.remote(first, held, sample)) == (
        [0, 1],
        [False] * 2 + [True] * 6,
        [slot >= 2 for slot in slots],
    )
    assert ray.get(update_elsewhere.remote(pickle.loads(pickle.dumps(second)), held, sample)) == (
        [2, 3],
        [False] * 4 + [True] * 4,
        [slot >= 4 for slot in slots],
    )
    assert leaves_of(rb) == [1] * 2 + [7] * 6  # 7 is the largest priority: the default of new ones


# ------------------------------------------------------------------ Ray: construction

TD_SAMPLER = {"sampler": partial(PrioritizedSampler, CAPACITY, 1.0, 1.0, eps=0.0)}
CLASSES = [
    (generations.ReplayBuffer, TD_SAMPLER),
    (TensorDictReplayBuffer, TD_SAMPLER),
    (PrioritizedReplayBuffer, PER),
]  # and TensorDictPrioritizedReplayBuffer above


def test_every_other_class_runs_in_an_actor(cluster):
    buffers = [
        cls(
            service_backend="ray",
            service_backend_options={"remote_config": {"num_cpus": 0}},
            storage=partial(LazyTensorStorage, CAPACITY),
            batch_size=4,
            track_generations=True,
            **arguments,
        )
        for cls, arguments in CLASSES
    ]
    for rb, (cls, _) in zip(buffers, CLASSES, strict=True):
        assert type(rb) is RayReplayBuffer
        assert isinstance(rb, cls)
        assert isinstance(rb, torchrl.data.RayReplayBuffer)
        assert isinstance(rb, generations.ReplayBuffer)
        held = all_handles(rb)
        assert held["generation"].tolist() == [0] * 8
        rb.extend(ids(range(3)))
        result = rb.update_priority_if_present(**held, priority=2.0)
        assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
        rb.shutdown()
        with pytest.raises(RuntimeError, match=r"^client\(\) needs an actor"):
            rb.client()


def test_what_the_buffer_cannot_do_is_said_by_its_actor(cluster):
    place = {"remote_config": {"num_cpus": 0}}
    untracked = RayReplayBuffer(**place, batch_size=4)
    torchrls = RayReplayBuffer(**place, replay_buffer_cls=torchrl.data.ReplayBuffer)
    call = {"index": [0], "generation": [0], "priority": 1.0}
    with pytest.raises(RuntimeError, match=r"update_priority_if_present\(\) needs stamps"):
        untracked.update_priority_if_present(**call)
    with pytest.raises(RuntimeError, match=r"extend\(return_generation=True\) needs stamps"):
        untracked.extend([1, 2], return_generation=True)
    assert torchrls.extend([1, 2]).tolist() == [0, 1]
    with pytest.raises(
        RuntimeError, match=r"needs a buffer with stamps: the actor's buffer is one"
    ):
        torchrls.update_priority_if_present(**call)
    untracked.shutdown()
    torchrls.shutdown()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"writer": torchrl.data.RoundRobinWriter, "track_generations": True},
            "needs a writer that tracks",
        ),
        ({"sizes": 3}, "unexpected keyword argument 'sizes'"),
    ],
)
def test_why_a_buffer_could_not_be_built_reaches_the_caller(cluster, arguments, reason):
    rb = RayReplayBuffer(remote_config={"num_cpus": 0}, **arguments)
    expected = rf"(?s)error raised in its creation task.*{reason}"
    with pytest.raises(ray.exceptions.ActorDiedError, match=expected):
        len(rb)
    rb.shutdown()


def test_the_example_in_the_docstring_runs(cluster):
    source = (RayReplayBuffer.__doc__ or "").replace("# doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(source, vars(our_ray).copy(), "", None, None)
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0


def test_other_backends_and_options_are_refused():
    with pytest.raises(ValueError, match="service_backend='direct' or 'ray', not 'thread'"):
        generations.ReplayBuffer(service_backend="thread")
    with pytest.raises(TypeError, match=r"ray_init_config and remote_config: got \['gpus'\]"):
        generations.ReplayBuffer(service_backend="ray", service_backend_options={"gpus": 1})


def test_a_users_class_is_what_the_service_is_asked_for(monkeypatch):
    class Mine(generations.ConditionalPriorityUpdates, torchrl.data.ReplayBuffer):
        pass

    class Sub(Mine):
        @classmethod
        def as_remote(cls, remote_config=None):
            return super().as_remote({"num_cpus": 0})

    asked = []
    in_actor = services.SERVICES["ray"].in_actor
    monkeypatch.setitem(
        services.SERVICES,
        "ray",
        services.Service(lambda cls, *args, **kwargs: asked.append((cls, kwargs)), in_actor),
    )
    options = {"remote_config": {"num_cpus": 0}}
    assert Sub(service_backend="ray", service_backend_options=options, batch_size=4) is None
    assert asked == [(Sub, {"service_backend_options": options, "batch_size": 4})]
    for cls in (Mine, Sub):
        actor = cls.as_remote({"num_cpus": 0})
        assert actor.is_remote
        assert cls in actor.__ray_metadata__.modified_class.__mro__


# ------------------------------------------------------------------ Ray: actors that die


@pytest.mark.parametrize("transport", ["ray", "distributed"])
def test_dead_actor_raises_at_once_and_leaves_the_callers_data_alone(own_rb, transport):
    rb = own_rb(transport=transport)
    client = rb.client()
    held, sample = all_handles(rb), rb.sample()
    data, priority = ids(range(8)), torch.arange(20.0, 28.0)
    sample["td_error"] = torch.ones(4)
    before = [value.clone() for value in (sample, data, priority, held["generation"])]
    actor = rb._rb._actor_id.hex()
    ray.kill(rb._rb)
    calls = [
        lambda: rb.update_priority_if_present(**held, priority=priority),
        lambda: client.update_priority_if_present(**held, priority=priority),
        lambda: client.update_tensordict_priority_if_present(sample),
        lambda: client.extend(data, return_generation=True),
        lambda: client.add(data[0], return_generation=True),
    ]
    start = time.monotonic()
    for call in calls:
        with pytest.raises(ray.exceptions.RayActorError, match=rf"(?s)Watched.*{actor}"):
            call()
    assert time.monotonic() - start < 5
    for now, then in zip((sample, data, priority, held["generation"]), before, strict=True):
        assert (now == then).all()
    if transport == "distributed":
        with pytest.raises(ray.exceptions.RayActorError):
            rb.shutdown()  # TorchRL's asks the actor


def answers(rb):
    """Waits until Ray has started the actor again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return len(rb)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def crash(rb):
    pid = ray.get(rb._rb._getpid.remote())
    os.kill(pid, signal.SIGKILL)
    answers(rb)
    assert ray.get(rb._rb._getpid.remote()) != pid


class Restartable(Watched):
    def _getpid(self):
        return os.getpid()


def test_restarted_actor_has_no_record_for_a_handle_of_before(own_rb):
    rb = own_rb(cls=Restartable, max_restarts=1)
    held = all_handles(rb)
    assert held["generation"].tolist() == [0] * 8
    crash(rb)
    assert len(rb) == 0
    assert rb.update_priority_if_present(**held, priority=5.0).num_stale == 8
    again = all_handles(rb)  # the same slots, written as often as before
    assert rb.update_priority_if_present(**held, priority=5.0).num_stale == 8
    assert leaves_of(rb) == [1] * 8
    assert rb.update_priority_if_present(**again, priority=5.0).num_updated == 8


def test_restarted_actor_knows_the_handles_of_its_checkpoint_and_no_others(own_rb, tmp_path):
    rb = own_rb(cls=Restartable, max_restarts=1)
    saved = all_handles(rb)
    rb.dumps(tmp_path)
    index, generation = rb.extend(ids(range(8, 11)), return_generation=True)
    crash(rb)
    rb.loads(tmp_path)
    lost = rb.update_priority_if_present(index=index, generation=generation, priority=9.0)
    assert lost.num_stale == 3
    assert rb.update_priority_if_present(**saved, priority=5.0).num_updated == 8
    rb.extend(ids(range(20, 23)))  # these slots, written as often as before the crash
    lost = rb.update_priority_if_present(index=index, generation=generation, priority=9.0)
    assert lost.num_stale == 3
    result = rb.update_priority_if_present(**saved, priority=6.0)
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5


def one_dimension(delayed_init):
    cls = our_ray.in_actor(TensorDictReplayBuffer)
    return cls(
        storage=partial(LazyTensorStorage, CAPACITY),
        track_generations=True,
        delayed_init=delayed_init,
    )


def two_dimensions():
    storage = LazyTensorStorage(CAPACITY, ndim=2)
    cls = our_ray.in_actor(TensorDictReplayBuffer)
    return cls(storage=storage, batch_size=4, track_generations=True)


def member_of_an_ensemble():
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
        for _ in range(2)
    ]
    return our_ray.in_actor(generations.ReplayBufferEnsemble)(*members)[1]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        partial(one_dimension, delayed_init=False),
        partial(one_dimension, delayed_init=True),
        two_dimensions,
        member_of_an_ensemble,
    ],
    ids=["built at once", "built late", "two dimensions", "an ensemble"],
)
def test_every_table_of_a_restarted_actor_starts_at_a_base(build, restarted, monkeypatch):
    monkeypatch.setattr(our_ray, "_is_restarted", lambda: restarted)
    rb = build()
    data = ids(range(8))
    data = data.reshape(2, 4) if rb.storage.ndim > 1 else data
    _, generation = rb.extend(data, return_generation=True)
    assert bool((generation > 1000).all()) is restarted


# ------------------------------------------------------------------ Ray: all at once


def learn(client, seconds, conditional=True):
    """Updates a few batches late; returns rows applied, rows stale, and updates."""
    counts = {"applied": 0, "stale": 0, "updates": 0}
    batches: deque = deque()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        batches.append(client.sample())
        if len(batches) <= LATE:
            continue
        late = batches.popleft()
        priority = (late["id"] + 1).float()
        counts["updates"] += 1
        if conditional:
            result = client.update_priority_if_present(
                index=late["index"], generation=late["index_generation"], priority=priority
            )
            counts["applied"] += result.num_updated
            counts["stale"] += result.num_stale
        else:
            client.update_priority(late["index"], priority)
    return counts


class Hand:
    """A process that writes, or learns."""

    def write(self, client, first_id, seconds):
        """Batches of 32 records; their ids are below DEFAULT."""
        torch.set_num_threads(1)
        deadline = time.monotonic() + seconds
        rows = 0
        while time.monotonic() < deadline:
            client.extend(ids(range(first_id + rows, first_id + rows + 32)))
            rows += 32
        return rows

    def learn(self, client, seconds):
        torch.set_num_threads(1)
        return learn(client, seconds)


@pytest.fixture(scope="module")
def hands(cluster):
    """Five processes that are ready to start at once."""
    hands = [ray.remote(num_cpus=0)(Hand).remote() for _ in range(5)]
    ray.get([hand.write.remote(None, 0, 0) for hand in hands])
    yield hands
    for hand in hands:
        ray.kill(hand)


@pytest.fixture(scope="module")
def shared_ring(cluster, request):
    transport = getattr(request, "param", "ray")
    rb = make(slots=SLOTS, batch_size=64, transport=transport, max_concurrency=4)
    yield rb
    rb.shutdown()


@pytest.fixture
def ring(shared_ring):
    """A full ring of 256 slots in an actor of four threads, all of one priority."""
    return full(shared_ring)


def full(rb):
    ray.get(rb._rb.begin_again.remote())
    return rb


both_transports = pytest.mark.parametrize("shared_ring", ["ray", "distributed"], indirect=True)


def start_writers(rb, hands, seconds):
    """Each hand writes with a client of its own."""
    clients = rb.clients(len(hands))
    return [
        hand.write.remote(client, 1_000 + 4_000_000 * number, seconds)
        for number, (hand, client) in enumerate(zip(hands, clients, strict=True))
    ]


class TestTwoWritersAndALearner:
    def check(self, ring, hands, seconds):
        written = start_writers(ring, hands[:2], seconds)
        counts = learn(ring.client(), seconds)
        assert all(rows > 2 * SLOTS for rows in ray.get(written))
        assert ray.get(ring._rb.all_misapplied.remote()) == 0
        assert counts["applied"] > 0
        assert counts["stale"] > 0

    @both_transports
    def test_for_two_seconds(self, ring, hands):
        self.check(ring, hands, seconds=2)

    @both_transports
    @pytest.mark.stress
    def test_for_half_a_minute(self, ring, hands):
        self.check(ring, hands, seconds=30)

    def test_put_priorities_on_other_records_with_update_priority(self, ring, hands):
        written = start_writers(ring, hands[:2], seconds=2)
        learn(ring.client(), seconds=2, conditional=False)
        ray.get(written)
        assert ray.get(ring._rb.all_misapplied.remote()) > 0


def test_learner_is_told_which_actor_died_in_the_middle_of_a_run(own_rb, hands):
    rb = full(own_rb(slots=SLOTS, batch_size=64))
    actor = rb._rb._actor_id.hex()
    written = start_writers(rb, hands[:2], seconds=PATIENCE)
    learning = hands[2].learn.remote(rb.client(), seconds=PATIENCE)
    assert learn(rb.client(), seconds=1)["applied"] > 0
    ray.kill(rb._rb)
    start = time.monotonic()
    for running in (learning, *written):
        with pytest.raises(ray.exceptions.RayActorError, match=rf"(?s)Watched.*{actor}"):
            ray.get(running)
    assert time.monotonic() - start < 5


def updates_per_second(rb, hands, seconds):
    clients = rb.clients(len(hands))
    counts = ray.get(
        [hand.learn.remote(client, seconds) for hand, client in zip(hands, clients, strict=True)]
    )
    assert all(count["applied"] > 0 and count["stale"] > 0 for count in counts)
    return sum(count["updates"] for count in counts) / seconds


def test_four_learners_with_clients_of_their_own(ring, hands, capsys):
    seconds = 1
    (written,) = start_writers(ring, hands[:1], seconds=2 * seconds)
    one = updates_per_second(ring, hands[1:2], seconds)
    four = updates_per_second(ring, hands[1:], seconds)
    ray.get(written)
    assert ray.get(ring._rb.all_misapplied.remote()) == 0
    with capsys.disabled():
        print(f"\nRay, updates per second: one learner {one:.0f}, four learners {four:.0f}")


# ------------------------------------------------------------------ guards


def late_sample(rb):
    """A sample of every slot whose records in slots 0 to 2 are gone by now."""
    index, generation = rb.extend(ids(range(CAPACITY)), return_generation=True)
    rb.extend(ids(range(3)))
    errors = torch.full([CAPACITY], 9.0)
    return ids(range(CAPACITY), index=index, index_generation=generation, td_error=errors)


def guarded(cls, **kwargs):
    return cls(
        service_backend="ray",
        service_backend_options={"remote_config": {"num_cpus": 0}},
        transport="ray",
        **PER,
        storage=partial(LazyTensorStorage, CAPACITY),
        batch_size=4,
        **kwargs,
    )


def test_a_guard_in_an_actor_is_conditional_and_counted_there(cluster):
    rb = guarded(TensorDictPrioritizedReplayBuffer, track_generations=True, guard_priorities=True)
    result = rb.update_tensordict_priority(late_sample(rb))
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert rb.client().stats()["updates_stale"] == 3
    rb.reset_stats()
    assert rb.stats()["updates_stale"] == 0
    rb.shutdown()


def test_the_trainer_hook_is_conditional_for_an_actor_and_its_clients(cluster):
    for as_the_hook_gets_it in (lambda rb: rb, lambda rb: rb.client()):
        rb = guarded(TensorDictPrioritizedReplayBuffer, track_generations=True)
        ReplayBufferTrainer(as_the_hook_gets_it(rb)).update_priority(late_sample(rb))
        assert rb.stats()["updates_applied"] == 5
        assert rb.stats()["updates_stale"] == 3
        rb.shutdown()


def test_the_readmes_buffer_in_an_actor_is_written_by_other_actors(cluster):
    @ray.remote(num_cpus=0)
    class Writer:
        def __init__(self, rb):
            self.rb = rb

        def write(self, first):
            self.rb.extend(ids(range(first, first + 256)))

    given = {"Writer": Writer, "partial": partial, "LazyTensorStorage": LazyTensorStorage}
    given["TensorDictPrioritizedReplayBuffer"] = TensorDictPrioritizedReplayBuffer
    exec(readme_example('service_backend="ray"'), given)
    rb, writers = given["rb"], given["writers"]
    ray.get([writer.write.remote(256 * i) for i, writer in enumerate(writers)])
    sample = rb.sample()
    sample["td_error"] = torch.ones(256)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 256
    rb.shutdown()


def test_a_launched_scripts_actor_guards(cluster):
    with installed():
        rb = guarded(torchrl.data.TensorDictPrioritizedReplayBuffer)
        assert isinstance(rb, torchrl.data.RayReplayBuffer)
        assert rb.update_tensordict_priority(late_sample(rb)).num_stale == 3
        rb.shutdown()
