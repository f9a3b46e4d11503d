"""Guarded buffers under TorchRL's trainers, the hook, and the counts that reach the loggers."""

from __future__ import annotations

import copy
import multiprocessing
import sys
import threading
from pathlib import Path

import pytest
import torch
from common import CAPACITY, PER, Thread, buffer, handles, ids, leaves, readme_example, td_buffer
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    Sequence,
)
from torchrl.data import TensorDictPrioritizedReplayBuffer as TorchRLBuffer
from torchrl.data.replay_buffers.generations import (
    LogPriorityUpdates,
    ReplayBufferEnsemble,
    ReplayBufferTrainer,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations import ReplayBuffer as OurReplayBuffer
from torchrl.data.replay_buffers.generations.core.result import Tally
from torchrl.data.replay_buffers.generations.training.plots import plot_priority_updates
from torchrl.envs import GymEnv
from torchrl.modules import (
    MLP,
    Actor,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DDPGLoss, DQNLoss, HardUpdate, SACLoss, SoftUpdate, TD3Loss
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.trainers import ReplayBufferTrainer as TorchRLHook
from torchrl.trainers.algorithms.ddpg import DDPGTrainer
from torchrl.trainers.algorithms.dqn import DQNTrainer
from torchrl.trainers.algorithms.sac import SACTrainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper, TD3Trainer

# Of TorchRL's own: experimental trainers, hook stages that will be renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
    pytest.mark.filterwarnings("ignore:.*Trainer is an experimental:UserWarning"),
]

COUNTS = ("updates_applied", "updates_stale", "stale_share")


def counts(rb) -> tuple:
    stats = rb.stats()
    return tuple(stats[name] for name in COUNTS)


def late_sample(rb, priority: float = 9.0) -> TensorDict:
    """A sample of every slot whose records in slots 0 to 2 are gone by now."""
    index = torch.arange(CAPACITY)
    sample = ids(range(CAPACITY), index=index, index_generation=rb.writer.generations_of(index))
    rb.extend(ids(range(100, 103)))
    return sample.set("td_error", torch.full([CAPACITY], priority))


# ---------------------------------------------------------------------- guard_priorities


@pytest.mark.parametrize("sync", [True, False])
def test_a_guarded_buffer_leaves_the_records_alone_that_are_not_the_samples(sync):
    rb = td_buffer(guard_priorities=True, sync=sync)
    result = rb.update_tensordict_priority(late_sample(rb))
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    rb.sample(1)  # lets the asynchronous learner catch up
    assert leaves(rb) == [1.0] * 3 + [9.0] * 5


@pytest.mark.parametrize("sync", [True, False])
def test_without_the_guard_the_same_call_is_torchrls(sync):
    rb = td_buffer(sync=sync)
    assert rb.update_tensordict_priority(late_sample(rb)) is None
    assert leaves(rb) == [9.0] * 8
    assert counts(rb) == (0, 0, 0.0)


def test_a_guard_without_tracking_is_raw_and_says_so():
    rb = TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(CAPACITY), guard_priorities=True
    )
    rb.extend(ids(range(CAPACITY)))
    sample = ids(range(CAPACITY), index=torch.arange(CAPACITY), td_error=torch.full([8], 9.0))
    with pytest.warns(UserWarning, match="guards nothing without stamps") as warned:
        assert rb.update_tensordict_priority(sample) is None
    assert warned[0].filename == __file__
    assert leaves(rb) == [9.0] * 8


def test_a_guard_without_priorities_does_nothing():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), track_generations=True, guard_priorities=True
    )
    rb.extend(ids(range(CAPACITY)))
    assert rb.update_tensordict_priority(late_sample(rb)) is None
    assert "updates_applied" not in rb.stats()


def test_a_guard_refuses_a_sample_that_lost_its_stamps_and_writes_nothing():
    rb = td_buffer(guard_priorities=True)
    sample = late_sample(rb).exclude("index_generation")
    with pytest.raises(KeyError, match="index_generation"):
        rb.update_tensordict_priority(sample)
    assert leaves(rb) == [1.0] * 8
    assert counts(rb) == (0, 0, 0.0)


def test_a_guard_takes_the_writer_that_tracks_in_place_of_the_argument():
    writer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), track_generations=True
    ).writer
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, **PER),
        writer=type(writer)(track_generations=True),
        guard_priorities=True,
    )
    rb.extend(ids(range(CAPACITY)))
    assert rb.update_tensordict_priority(late_sample(rb)).num_stale == 3


def test_a_guarded_buffer_still_writes_the_priorities_that_its_records_carry():
    rb = td_buffer(records=0, guard_priorities=True)
    rb.extend(ids(range(7), td_error=torch.arange(1.0, 8.0)))
    rb.add(TensorDict({"id": torch.tensor(7), "td_error": torch.tensor(8.0)}))
    assert leaves(rb) == [float(priority) for priority in range(1, 9)]
    # A sample put back carries the stamps of another record.
    sample = rb.sample(1)
    rb.add(sample[0].set("td_error", torch.tensor(20.0)))
    assert leaves(rb)[0] == 20.0
    assert counts(rb) == (0, 0, 0.0)


def test_another_threads_write_does_not_make_a_guarded_update_raw():
    rb = td_buffer(guard_priorities=True)
    sample = late_sample(rb)
    inside, asked, go_on = threading.Event(), threading.Event(), threading.Event()
    put, guards = rb.writer._put_pairs, rb._guards_samples

    def held(*args):
        inside.set()
        assert go_on.wait(10)
        return put(*args)

    def watched():
        answer = guards()
        asked.set()
        return answer

    rb.writer._put_pairs, rb._guards_samples = held, watched
    writer = Thread(lambda: rb.extend(ids(range(200, 201))))  # takes slot 3
    assert inside.wait(10)
    updater = Thread(lambda: rb.update_tensordict_priority(sample))
    assert asked.wait(10)
    go_on.set()
    writer.join()
    assert updater.join().updated_mask.tolist() == [False] * 4 + [True] * 4


def test_one_record_at_a_time_is_guarded_too():
    rb = td_buffer(guard_priorities=True)
    sample = late_sample(rb)
    assert rb.update_tensordict_priority(sample[0]).num_stale == 1
    assert rb.update_tensordict_priority(sample[7]).num_updated == 1
    assert leaves(rb) == [1.0] * 7 + [9.0]


def test_only_tensordict_buffers_have_the_guard():
    with pytest.raises(TypeError, match="guard_priorities"):
        OurReplayBuffer(storage=LazyTensorStorage(CAPACITY), guard_priorities=True)


def test_a_copy_of_a_guarded_buffer_is_guarded():
    rb = copy.deepcopy(td_buffer(guard_priorities=True))
    assert rb.update_tensordict_priority(late_sample(rb)).num_stale == 3


# ---------------------------------------------------------------------- counts


def test_stats_count_applied_and_stale_handles_until_they_are_reset():
    rb = buffer()
    held = handles(rb)
    assert counts(rb) == (0, 0, 0.0)
    rb.extend(torch.arange(2))
    rb.update_priority_if_present(**held, priority=2.0)
    assert counts(rb) == (6, 2, 0.25)
    rb.update_priority_if_present(index=5, generation=0, priority=2.0)
    rb.update_priority_if_present(index=5, generation=-1, priority=2.0)
    assert counts(rb) == (7, 3, 0.3)
    rb.reset_stats()
    assert counts(rb) == (0, 0, 0.0)


def test_each_of_two_handles_of_one_record_counts():
    rb = buffer()
    rb.update_priority_if_present(index=[3, 3, 9], generation=[0, 0, 0], priority=2.0)
    assert counts(rb) == (2, 1, 1 / 3)


def test_an_update_that_is_refused_does_not_count():
    rb = buffer()
    with pytest.raises(ValueError, match="priority"):
        rb.update_priority_if_present(**handles(rb), priority=-1.0)
    assert counts(rb) == (0, 0, 0.0)


def test_stats_without_tracking_or_priorities_are_torchrls():
    for rb in (
        TensorDictPrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CAPACITY)),
        TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True),
    ):
        assert rb.stats() == TorchRLBuffer(**PER, storage=LazyTensorStorage(CAPACITY)).stats()


def test_a_copy_counts_for_itself():
    rb = buffer()
    rb.update_priority_if_present(**handles(rb), priority=2.0)
    copied = copy.deepcopy(rb)
    assert counts(copied) == (0, 0, 0.0)
    copied.update_priority_if_present(**handles(copied, [1, 2]), priority=2.0)
    assert counts(copied) == (2, 0, 0.0)
    assert counts(rb) == (8, 0, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_counts_for_itself():
    rb = buffer()
    rb.share()
    rb.update_priority_if_present(**handles(rb), priority=2.0)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(rb._tally.totals()))
    child.start()
    assert ours.recv() == (0, 0)
    child.join(10)
    assert counts(rb) == (8, 0, 0.0)


def test_masks_are_counted_without_a_look_at_them():
    tally = Tally()
    tally.count(2, 3)
    tally.count(torch.tensor([True, False, True, True]).sum(), 4)
    tally.count(torch.tensor([False]).sum(), 1)
    tally.count(1, 2)
    assert isinstance(tally._counts[0], torch.Tensor)  # nobody has asked for the number
    assert tally.totals() == (6, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_counting_does_not_wait_for_the_gpu():
    tally = Tally()
    mask = torch.tensor([True, False, True], device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.count(mask.sum(), mask.numel())
        tally.count(mask.sum(), mask.numel())
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert tally.totals() == (4, 2)


def ensemble_and_late_sample(**kwargs):
    """Two members, and a sample of their slots; the first one's records are gone by now."""
    members = [td_buffer(**kwargs) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=16)
    sample = ensemble.sample()
    members[0].extend(ids(range(CAPACITY)))
    return ensemble, sample.set("td_error", torch.full([2, 8], 9.0))


def test_an_ensemble_counts_what_its_members_count():
    ensemble, sample = ensemble_and_late_sample()
    ensemble.update_tensordict_priority_if_present(sample)
    assert counts(ensemble) == (8, 8, 0.5)
    assert [counts(rb) for rb in ensemble._rbs] == [(0, 8, 1.0), (8, 0, 0.0)]
    ensemble._rbs[1].update_priority_if_present(index=0, generation=0, priority=2.0)
    assert counts(ensemble) == (9, 8, 8 / 17)
    ensemble.reset_stats()
    assert [counts(rb) for rb in ensemble._rbs] == [(0, 0, 0.0)] * 2


def test_the_cells_of_a_storage_with_two_dimensions_are_guarded():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=PrioritizedSampler(12, **PER),
        batch_size=12,
        track_generations=True,
        guard_priorities=True,
    )

    def extend(slots):  # of three cells each
        rb.extend(TensorDict({"id": torch.zeros(3, slots)}, [3, slots]))

    extend(2)
    sample = rb.sample()
    extend(2)  # fills the ring
    extend(2)  # other records take slots 0 and 1
    sample["index"] = torch.tensor([(slot, cell) for slot in range(4) for cell in range(3)])
    sample["index_generation"] = torch.zeros(12, dtype=torch.int64)
    overwritten = sample["index"][:, 0] < 2
    sample["td_error"] = torch.full([12], 9.0)
    result = rb.update_tensordict_priority(sample)
    assert result.updated_mask.tolist() == (~overwritten).tolist()
    assert counts(rb)[:2] == (int((~overwritten).sum()), int(overwritten.sum()))


def test_the_anchors_of_sequences_are_guarded():
    rb = td_buffer(0, guard_priorities=True, sample_unit=Sequence(length=2), batch_size=4)
    steps = ids(range(CAPACITY)).set(("next", "done"), torch.zeros(CAPACITY, 1, dtype=torch.bool))
    rb.extend(steps)
    sample = rb.sample()
    rb.extend(steps)
    sample["td_error"] = torch.full(sample.shape, 9.0)
    assert rb.update_tensordict_priority(sample).num_updated == 0
    assert leaves(rb) == [1.0] * 8


# ---------------------------------------------------------------------- our hook


def test_the_hook_is_conditional_for_a_tracking_buffer_without_the_guard_too():
    rb = td_buffer()
    ReplayBufferTrainer(rb).update_priority(late_sample(rb))
    assert leaves(rb) == [1.0] * 3 + [9.0] * 5
    TorchRLHook(rb).update_priority(late_sample(rb))  # slots 3 to 5 are new now
    assert leaves(rb) == [9.0] * 8


def test_the_hook_is_torchrls_for_any_other_buffer():
    raw = TorchRLBuffer(**PER, storage=LazyTensorStorage(CAPACITY))
    raw.extend(ids(range(CAPACITY)))
    sample = ids(range(CAPACITY), index=torch.arange(CAPACITY), td_error=torch.full([8], 9.0))
    ReplayBufferTrainer(raw).update_priority(sample)
    assert raw._sampler._sum_tree[torch.arange(CAPACITY)].tolist() == [9.0] * 8

    unprioritized = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), track_generations=True
    )
    unprioritized.extend(ids(range(CAPACITY)))
    ReplayBufferTrainer(unprioritized).update_priority(late_sample(unprioritized))

    plain = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    ReplayBufferTrainer(plain).update_priority(sample)


def test_the_hook_is_conditional_for_an_ensemble_too():
    ensemble, sample = ensemble_and_late_sample()
    ReplayBufferTrainer(ensemble).update_priority(sample)
    assert leaves(ensemble._rbs[0]) == [1.0] * 8
    assert {leaves(ensemble._rbs[1])[slot] for slot in sample["index"]["index"][1]} == {9.0}


class Recorder:
    """As much of a trainer as a hook sees when it registers."""

    def __init__(self):
        self.modules, self.ops = {}, []

    def register_module(self, name, module):
        self.modules[name] = module

    def register_op(self, stage, op):
        self.ops.append((stage, op))


def test_the_hook_registers_as_torchrls_does_and_logs_on_top():
    rb, trainer, theirs = td_buffer(), Recorder(), Recorder()
    hook = ReplayBufferTrainer(rb)
    hook.register(trainer)
    stock = TorchRLHook(rb)
    stock.register(theirs)
    assert [stage for stage, _ in trainer.ops] == [
        *(stage for stage, _ in theirs.ops),
        "post_steps_log",
    ]
    assert [op for _, op in trainer.ops[:3]] == [hook.extend, hook.sample, hook.update_priority]
    assert list(trainer.modules) == ["replay_buffer", "replay_buffer_updates"]
    rb.update_tensordict_priority_if_present(late_sample(rb))
    assert trainer.ops[3][1](None) == {
        "log_pbar": True,
        "updates_applied": 5,
        "updates_stale": 3,
        "stale_share": 0.375,
    }


def test_nothing_is_logged_for_a_buffer_that_counts_nothing():
    assert LogPriorityUpdates(ReplayBuffer(storage=LazyTensorStorage(4)))() is None


def test_the_figure_shows_the_stale_share_of_each_stretch_and_begins_anew_after_a_reset(tmp_path):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    for frames, applied, stale in ((100, 10, 0), (200, 20, 30), (300, 20, 30), (400, 6, 2)):
        logger.log_scalar("updates_applied", applied, step=frames)
        logger.log_scalar("updates_stale", stale, step=frames)
    applied_and_stale, share = plot_priority_updates(logger.experiment.log_dir).axes
    assert share.lines[0].get_xydata().tolist() == [[200, 0.75], [400, 0.25]]
    assert [line.get_label() for line in applied_and_stale.lines] == ["applied", "stale"]
    assert applied_and_stale.lines[1].get_ydata().tolist() == [0, 30, 30, 2]
    with pytest.raises(FileNotFoundError, match="LogPriorityUpdates"):
        plot_priority_updates(tmp_path)


# ---------------------------------------------------------------------- TorchRL's trainers


class Audited(TensorDictPrioritizedReplayBuffer):
    """Gives each record a number of its own, and looks whose record each priority reached."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.written = threading.Event()
        self.next_id = self.sent = self.gone = self.misapplied = self.withheld = 0

    def extend(self, tensordicts, **kwargs):
        rows = len(tensordicts)
        tensordicts["record_id"] = torch.arange(self.next_id, self.next_id + rows)
        self.next_id += rows
        index = super().extend(tensordicts, **kwargs)
        self.written.set()
        return index

    def update_tensordict_priority(self, data):
        with SlotGenerations.attach(self.storage).lock:
            gone = self.storage.get(data["index"])["record_id"] != data["record_id"]
            result = super().update_tensordict_priority(data)
            written = torch.ones_like(gone) if result is None else result.updated_mask
        self.sent += gone.numel()
        self.gone += int(gone.sum())
        self.misapplied += int((gone & written).sum())
        self.withheld += int((~gone & ~written).sum())
        return result


def audited(guard: bool, slots: int = 500) -> Audited:
    return Audited(
        alpha=0.7,
        beta=0.5,
        storage=LazyTensorStorage(slots),
        batch_size=32,
        track_generations=True,
        guard_priorities=guard,
    )


FRAMES = 900


def dqn_arguments(replay_buffer=None) -> dict:
    """What a DQNTrainer needs; with a buffer, its collector's thread writes while it learns."""
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1")
    spec = env.action_spec
    network = QValueActor(MLP(in_features=4, out_features=2, num_cells=[32]), spec=spec)
    explore = EGreedyModule(spec, annealing_num_steps=FRAMES)
    loss = DQNLoss(network, action_space=spec, delay_value=True)
    collector = Collector(
        env,
        TensorDictSequential(network, explore),
        replay_buffer=replay_buffer,
        frames_per_batch=50,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    return {
        "collector": collector,
        "total_frames": FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": 5,
        "loss_module": loss,
        "optimizer": torch.optim.Adam(loss.parameters()),
        "target_net_updater": HardUpdate(loss, value_network_update_interval=20),
        "greedy_module": explore,
        "async_collection": replay_buffer is not None,
        "enable_logging": False,
        "progress_bar": False,
        "log_interval": 100,
    }


def train_dqn(rb, logger=None) -> DQNTrainer:
    """One that lets the collector write between a sample and its update, now and then."""
    trainer = DQNTrainer(replay_buffer=rb, logger=logger, **dqn_arguments(rb))

    def let_the_collector_write(batch):
        """Every tenth sample waits until the collector has put other records into the ring."""
        if trainer._optim_count % 10 == 0 and len(rb) == rb.storage.max_size:
            rb.written.clear()
            assert rb.written.wait(10)

    trainer.register_op("process_optim_batch", let_the_collector_write)
    return trainer


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_guarded_dqn_trainer_misapplies_nothing_and_logs_its_stale_share(kind, tmp_path):
    rb = audited(guard=True)
    if kind == "csv":
        logger = CSVLogger("run", log_dir=str(tmp_path))
    else:
        logger = TensorboardLogger("run", log_dir=str(tmp_path))
    trainer = train_dqn(rb, logger)
    before = [weights.clone() for weights in trainer.loss_module.parameters()]
    LogPriorityUpdates(rb).register(trainer)
    trainer.train()

    assert rb.misapplied == 0 < rb.gone
    assert rb.withheld == 0
    assert counts(rb) == (rb.sent - rb.gone, rb.gone, rb.gone / rb.sent)
    after = trainer.loss_module.parameters()
    assert not any(torch.equal(*weights) for weights in zip(before, after, strict=True))
    logged = read_log(kind, logger)
    assert logged["updates_applied"][-1] > 0
    assert 0 < logged["stale_share"][-1] < 1
    assert logged["updates_stale"] == sorted(logged["updates_stale"])


def read_log(kind: str, logger) -> dict[str, list[float]]:
    if kind == "csv":
        folder = Path(logger.experiment.log_dir)
        plot_priority_updates(folder)
        return {
            name: [
                float(row.split(",")[1])
                for row in (folder / "scalars" / f"{name}.csv").read_text().split()
            ]
            for name in COUNTS
        }
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger.experiment.flush()
    events = EventAccumulator(logger.experiment.log_dir).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in COUNTS}


def test_without_the_guard_the_same_trainer_misapplies():
    rb = audited(guard=False)
    train_dqn(rb).train()
    assert rb.misapplied == rb.gone > 0


def test_the_readmes_trainer_trains_and_logs(tmp_path):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    given = {
        "DQNTrainer": DQNTrainer,
        "LazyTensorStorage": LazyTensorStorage,
        "LogPriorityUpdates": LogPriorityUpdates,
        "TensorDictPrioritizedReplayBuffer": TensorDictPrioritizedReplayBuffer,
        "what_it_needs_otherwise": {**dqn_arguments(), "logger": logger, "total_frames": 200},
    }
    exec(readme_example("DQNTrainer"), given)
    given["trainer"].train()
    assert counts(given["rb"]) == (4 * 5 * 32, 0, 0.0)
    assert read_log("csv", logger)["updates_applied"][-1] > 0


def train_continuous(name: str, rb: Audited) -> None:
    """Trains while other records take half of the ring between each sample and its update."""
    torch.manual_seed(0)
    env = GymEnv("Pendulum-v1")
    spec = env.action_spec
    wide = 2 if name == "sac" else 1
    layers = [MLP(in_features=3, out_features=wide, num_cells=[16])]
    if name == "sac":
        actor = ProbabilisticActor(
            TensorDictModule(
                nn.Sequential(*layers, NormalParamExtractor()), ["observation"], ["loc", "scale"]
            ),
            spec=spec,
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
        )
    else:
        actor = Actor(nn.Sequential(*layers, nn.Tanh()), spec=spec)
    value = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[16]), in_keys=["observation", "action"]
    )
    if name == "ddpg":
        loss = DDPGLoss(actor, value)
    elif name == "sac":
        loss = SACLoss(actor, value)
    else:
        loss = TD3Loss(actor, value, action_spec=spec)
    stepper = {}
    if name == "td3":
        stepper["optimization_stepper"] = TD3OptimizationStepper(
            torch.optim.Adam(loss.actor_network_params.flatten_keys().values()),
            torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values()),
        )
    trainer = {"ddpg": DDPGTrainer, "sac": SACTrainer, "td3": TD3Trainer}[name](
        collector=Collector(
            env,
            actor,
            frames_per_batch=32,
            total_frames=128,
            auto_register_policy_transforms=False,
        ),
        total_frames=128,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=None if stepper else torch.optim.Adam(loss.parameters()),
        replay_buffer=rb,
        target_net_updater=SoftUpdate(loss, eps=0.99),
        enable_logging=False,
        progress_bar=False,
        **stepper,
    )
    trainer.register_op("process_optim_batch", lambda batch: overwrite_half(rb, batch))
    trainer.train()


def overwrite_half(rb: Audited, sample: TensorDict) -> None:
    half = rb.storage.max_size // 2
    rb.extend(sample[torch.arange(half) % len(sample)].exclude("index", "index_generation"))


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_trainers_for_continuous_actions_are_safe_with_a_guarded_buffer_alone(name, guard):
    rb = audited(guard, slots=64)
    train_continuous(name, rb)
    assert rb.sent == 4 * 2 * 32
    assert rb.gone > 0
    assert rb.withheld == 0
    assert rb.misapplied == (0 if guard else rb.gone)
