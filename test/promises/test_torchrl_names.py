"""Every private name of TorchRL, tensordict and torch that the package uses is still there.

``TABLE`` says of each what it is, whose it is, and which functions of ours use it. After a change
of the package, this command writes the table anew:

    .venv/bin/python test/promises/test_torchrl_names.py

When a name is gone after an upgrade, read the functions named here before anything else.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict import MemoryMappedTensor, TensorClass, TensorDict
from torchrl.data import LazyTensorStorage, replay_buffers
from torchrl.data.replay_buffers import generations, ray_buffer
from torchrl.trainers import ReplayBufferTrainer

TABLE = """
_LazyDistributedReplayClient (class of ray_buffer): remote.ray._DistributedClient
_RayReplayBufferClient (class of ray_buffer): remote.ray._Client
_ServiceClass (function of ReplayBuffer): buffers.services.service_class
_actor (attribute of _LazyDistributedReplayClient and _RayReplayBufferClient):
    remote.ray._ConditionalCalls._guards_samples, remote.ray._ConditionalCalls._method
_add (function of ReplayBuffer): buffers.writes
_align_generation_device (function of RoundRobinWriter):
    writers.ring.RoundRobinWriter._align_generation_device
_alpha (attribute of PrioritizedSampler): checkpoints.fit_parts.check_sampler, core.trees._default,
    core.trees._values, core.update._fits, core.update.checked_priority
_at_fork_reinit (function of RLock): core.table
_attached_entities (property of Storage): buffers.parts.leave_storage, checkpoints.copies._copied,
    checkpoints.saving.Saves._default_what_is_gone, core.trees.Trees.samplers,
    processes.sharing.Sharing._late_writer, processes.sharing.Sharing._refusal_in_child,
    processes.sharing.Sharing.install_cells, writers.ring.RoundRobinWriter._put_pairs,
    writers.stamping.give_default_priority
_attached_entities_list (attribute of Storage): checkpoints.copies._copied,
    checkpoints.copies.without_parts
_auto_cleanup (attribute of LazyMemmapStorage): checkpoints.copies.own_files
_batch_size (attribute of OfflineToOnlineReplayBuffer and ReplayBuffer):
    buffers.ensemble.ReplayBufferEnsemble.__getitem__, buffers.sampling.sample,
    checkpoints.fits._settings, checkpoints.fits.check_state, writers.columns.Columns.__init__,
    writers.columns.Columns.is_of
_beta (attribute of PrioritizedSampler): checkpoints.fit_parts.check_sampler, core.trees.draw
_bump_generation (function of RoundRobinWriter): writers.ring.RoundRobinWriter._bump_generation
_cache (attribute of SliceSampler): checkpoints.fit_parts._try
_catch_up_prioritized_sampler (function of PrioritizedReplayBuffer and
    TensorDictPrioritizedReplayBuffer): buffers.recording.Records._catch_up_prioritized_sampler
_client (attribute of RayReplayBuffer): remote.ray.RayReplayBuffer.__init__
_collate_fn (attribute of ReplayBuffer): buffers.recording.Records._sample
_collate_fn_val (attribute of ReplayBufferEnsemble):
    buffers.ensemble.ReplayBufferEnsemble.__getitem__
_collate_fns (attribute of ReplayBufferEnsemble): buffers.ensemble.ReplayBufferEnsemble.__getitem__
_compilable (attribute of Storage and Writer): core.table.SlotGenerations.advance_ring,
    processes.sharing.Sharing._check_shareable, processes.sharing.Sharing.install_cells,
    processes.sharing.Sharing.install_writer_cells, writers.columns.columns_of,
    writers.ring.RoundRobinWriter._put
_consume_after_n_samples (attribute of ReplayBuffer): checkpoints.fits._settings
_current_top_values (attribute of TensorDictMaxValueWriter): checkpoints.fit_parts._read_writer,
    checkpoints.fit_parts.check_writer, checkpoints.fit_parts.writer_state,
    writers.max_value.TensorDictMaxValueWriter._insert,
    writers.max_value.TensorDictMaxValueWriter._ranking,
    writers.max_value.TensorDictMaxValueWriter.load_state_dict,
    writers.max_value.TensorDictMaxValueWriter.rank_what_ran_on,
    writers.max_value.TensorDictMaxValueWriter.register_storage,
    writers.max_value.TensorDictMaxValueWriter.state_dict
_cursor (property of RoundRobinWriter, attribute of TensorDictMaxValueWriter): buffers.parts._bind,
    buffers.parts.change_storage, buffers.writes._forget_written,
    checkpoints.fit_parts._read_writer, checkpoints.fit_parts.check_writer,
    writers.max_value.TensorDictMaxValueWriter._ranking,
    writers.max_value.TensorDictMaxValueWriter.load_state_dict,
    writers.max_value.TensorDictMaxValueWriter.rank_what_ran_on,
    writers.max_value.TensorDictMaxValueWriter.register_storage,
    writers.max_value.TensorDictMaxValueWriter.state_dict, writers.ring.RoundRobinWriter._abandon,
    writers.ring.RoundRobinWriter._empty, writers.ring.RoundRobinWriter._put_as_torchrl,
    writers.ring.RoundRobinWriter._put_pairs, writers.ring.RoundRobinWriter._ring_write,
    writers.ring.RoundRobinWriter._traced_write, writers.ring.RoundRobinWriter.write_at
_cursor_value (attribute of RoundRobinWriter): processes.sharing
_device (attribute of PrioritizedSampler): writers.columns.Columns.__init__,
    writers.columns.Columns.is_of
_distributed_batch_size (attribute of RayReplayBuffer): remote.ray.RayReplayBuffer.client
_empty (function of Sampler and Storage and Writer): buffers.parts.forget_priorities,
    checkpoints.saving.Saves._load_learners, writers.max_value.TensorDictMaxValueWriter._empty,
    writers.ring.RoundRobinWriter._empty
_eps (attribute of PrioritizedSampler): checkpoints.fit_parts.check_sampler, core.trees._default,
    core.trees._values, core.update._fits, core.update.checked_priority
_extend (function of ReplayBuffer): buffers.writes
_filename (attribute of MemoryMappedTensor): processes.memory._places,
    processes.sharing.Sharing.is_inside
_fragmented_index (attribute of SliceSampler): checkpoints.fit_parts._try
_from_tensordict (function of ConditionalUpdateResult and Trajectory):
    writers.columns.Columns.__init__
_futures_lock (attribute of ReplayBuffer): buffers.background.submit,
    buffers.conditional._reset_in_child, processes.holding._futures
_generation (property of RoundRobinWriter): checkpoints.fit_parts._read_writer,
    core.restore._compare, core.restore.prepare_restore, core.restore.restore,
    core.restore.saved_stamps, writers.max_value.TensorDictMaxValueWriter.dumps,
    writers.ring.RoundRobinWriter._generation, writers.ring.RoundRobinWriter.loads,
    writers.stamping
_get_priority_item (function of TensorDictReplayBuffer): buffers.updates.update_sample,
    buffers.writes
_get_priority_vector (function of TensorDictReplayBuffer): buffers.updates.update_sample
_init (function of PrioritizedSampler and ReplayBuffer and StoreStorage and TensorStorage):
    buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.ensemble.ReplayBufferEnsemble._init, launch.names.GuardedBuffer._init,
    remote.ray._Actor._init
_init_compilable (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.conditional.ConditionalPriorityUpdates._maybe_make_writer
_init_directory (attribute of LazyTensorStorage): checkpoints.copies.own_files,
    processes.first_write.FirstWrite.acquire
_init_event (attribute of LazyTensorStorage): processes.first_write.FirstWrite.__init__,
    processes.sharing.Sharing._first_write, processes.sharing.Sharing.install_cells
_init_generator (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._init
_init_lock (attribute of LazyTensorStorage): processes.sharing.Sharing.install_cells
_init_sampler (attribute of ReplayBuffer): buffers.ensemble.ReplayBufferEnsemble._init
_init_storage (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.ensemble.ReplayBufferEnsemble._init
_init_writer (attribute of ReplayBuffer): buffers.ensemble.ReplayBufferEnsemble._init
_initialize_prioritized_sampler (function of ReplayBuffer): buffers.parts.forget_priorities,
    buffers.recording.Records._initialize_prioritized_sampler
_initialized (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.ensemble.ReplayBufferEnsemble._init
_is_owned (function of RLock): buffers.classes.TensorDictReplayBuffer.update_tensordict_priority,
    buffers.conditional.ConditionalPriorityUpdates._guards_samples, buffers.updates.update_by_slot,
    processes.lock._ThreadHalf, processes.writing
_is_tensordict (attribute of ReplayBuffer): buffers.ensemble_updates.update_sample.priority,
    buffers.parts.default_writer, buffers.sampling.sample, buffers.updates.update_sample,
    buffers.writes._brought, buffers.writes._is_direct, buffers.writes._take_steps
_known_storage_len (attribute of ConsumingSampler): checkpoints.fit_parts._try
_last_cursor (attribute of Storage): writers.ring.RoundRobinWriter._put_pairs
_last_cursor_index_value (attribute of Storage): processes.sharing
_len (property of StoreStorage and TensorStorage): checkpoints.fit_records._check_tensors,
    checkpoints.fit_records._room_for, checkpoints.fit_records.check_records,
    core.compiled.stamps_at, processes.sharing.Sharing.forget_failed_first_write,
    writers.max_value.TensorDictMaxValueWriter._put, writers.ring.RoundRobinWriter._abandon,
    writers.ring.RoundRobinWriter._ring_write,
    writers.ring.RoundRobinWriter._update_storage_len_for_write_at
_len_value (attribute of StoreStorage and TensorStorage): processes.sharing,
    processes.sharing.Sharing.install_cells
_load_hooks (attribute of StorageCheckpointerBase): checkpoints.fit_records._check_dumped
_max_capacity (attribute of PrioritizedSampler): checkpoints.fit_parts._read_priorities
_max_priority (property of PrioritizedSampler): checkpoints.fit_parts.check_sampler,
    checkpoints.samplers.dumpable, checkpoints.saving.Saves._forget_largest, core.trees._default,
    core.trees._highest, core.trees.write_default, core.trees.write_priority
_max_priority_within_buffer (attribute of PrioritizedSampler): buffers.writes._is_direct,
    core.trees._is_plain
_maybe_make_storage (function of ReplayBuffer):
    buffers.conditional.ConditionalPriorityUpdates._init
_maybe_make_writer (function of ReplayBuffer):
    buffers.conditional.ConditionalPriorityUpdates._maybe_make_writer,
    buffers.ensemble.ReplayBufferEnsemble._maybe_make_writer,
    launch.names.GuardedBuffer._maybe_make_writer
_metadata (attribute of CompressedListStorage): checkpoints.fit_records._check_list
_min_tree (attribute of PrioritizedSampler): buffers.sampling.unmask_leaves, checkpoints.samplers,
    core.trees._set, core.trees.draw
_mutation_revision (property of Storage): processes.sharing.Sharing.revision
_mutation_revision_value (attribute of Storage): processes.sharing
_new_unsafe (function of TensorDictBase): core.result.PriorityUpdateResult.of,
    writers.columns.Columns.read
_non_tensordict (attribute of ATensorClass): core.result.PriorityUpdateResult.of,
    writers.columns._plain
_pending_update_futures (attribute of ReplayBuffer): buffers.background.submit,
    buffers.background.synchronize, buffers.conditional._reset_in_child
_pin_memory (attribute of ReplayBuffer): buffers.sampling.is_direct
_prefetch (attribute of ReplayBuffer): buffers.conditional._reset_in_child,
    buffers.sampling.sample, checkpoints.copies.check_sendable
_prefetch_cap (attribute of ReplayBuffer): buffers.conditional._reset_in_child,
    checkpoints.copies.check_sendable
_prefetch_executor (attribute of ReplayBuffer): buffers.conditional._reset_in_child
_prefetch_queue (attribute of ReplayBuffer): buffers.background.submit,
    buffers.background.synchronize, buffers.conditional._reset_in_child
_prioritized_sampler (attribute of PrioritizedReplayBuffer and TensorDictPrioritizedReplayBuffer):
    buffers.conditional._reset_in_child, buffers.parts.change_sampler,
    buffers.recording.Records._learner_sampler, core.trees.Trees.samplers
_rank_key (attribute of TensorDictMaxValueWriter): checkpoints.fit_parts._read_writer,
    checkpoints.fit_parts.check_writer, writers.max_value.TensorDictMaxValueWriter._rankable,
    writers.max_value.TensorDictMaxValueWriter.load_state_dict,
    writers.max_value.TensorDictMaxValueWriter.state_dict
_rb (attribute of RayReplayBuffer): remote.ray.RayReplayBuffer.__init__,
    remote.ray.RayReplayBuffer.client
_rbs (attribute of ReplayBufferEnsemble): buffers.ensemble.ReplayBufferEnsemble.__getitem__,
    buffers.ensemble.ReplayBufferEnsemble._check_all_track,
    buffers.ensemble.ReplayBufferEnsemble._check_writer,
    buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble.ReplayBufferEnsemble._guards_samples,
    buffers.ensemble.ReplayBufferEnsemble._init,
    buffers.ensemble.ReplayBufferEnsemble._member_list,
    buffers.ensemble.ReplayBufferEnsemble.extend, buffers.ensemble_updates._update,
    buffers.ensemble_updates.update_handles, buffers.ensemble_updates.update_sample,
    buffers.ensemble_updates.update_sample.priority, checkpoints.copies._copied,
    checkpoints.copies.rejoin, remote.ray._Actor._init
_replay_lock (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._begin,
    buffers.conditional._reset_in_child, buffers.ensemble.ReplayBufferEnsemble.empty,
    buffers.ensemble.ReplayBufferEnsemble.extend, buffers.ensemble_updates._update,
    checkpoints.copies.rejoin, core.table.SlotGenerations.adopt
_replicate_index (function of Writer): writers.ring.RoundRobinWriter._put_as_torchrl
_rng (attribute of ReplayBuffer and Sampler and Storage and Writer):
    buffers.ensemble.ReplayBufferEnsemble.__getitem__, checkpoints.copies.rejoin,
    checkpoints.fits._settings, core.trees._draws_plainly
_rng_private (attribute of SamplerEnsemble and StorageEnsemble and WriterEnsemble):
    checkpoints.copies.without_parts
_route (function of ReplayBufferEnsemble): buffers.ensemble.ReplayBufferEnsemble.extend
_sample (function of ReplayBuffer): buffers.recording.Records._sample, buffers.sampling.is_direct,
    buffers.sampling.sample
_sample_dependency (attribute of ReplayBuffer): buffers.background.submit,
    buffers.background.synchronize, buffers.conditional._reset_in_child, buffers.sampling.sample
_sample_list (attribute of SamplerWithoutReplacement): checkpoints.fit_parts._try
_sample_unit (attribute of ReplayBuffer): buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.parts.change_writer, buffers.sampling.read, buffers.updates.update_sample
_sampler (attribute of ReplayBuffer):
    buffers.conditional.ConditionalPriorityUpdates._maybe_make_writer,
    buffers.ensemble.ReplayBufferEnsemble.__getitem__,
    buffers.ensemble.ReplayBufferEnsemble._follow_members, buffers.parts.change_sampler,
    buffers.parts.change_storage, buffers.parts.change_writer,
    buffers.recording.Records._priority_sampler, buffers.recording.Records.mark_update,
    buffers.recording.Records.mark_written, buffers.sampling.as_torchrl,
    buffers.sampling.is_direct, buffers.sampling.read, buffers.updates.needed_parts,
    buffers.updates.update_by_slot, buffers.writes._brought, buffers.writes._is_direct,
    buffers.writes._take_steps, buffers.writes._write, buffers.writes.write_brought,
    checkpoints.copies.without_parts, checkpoints.fit_parts._read_priorities,
    checkpoints.fit_parts.check_sampler, checkpoints.fits, checkpoints.fits._check,
    core.trees.Trees.samplers, processes.sharing.Sharing._refusal_in_child
_samplers (attribute of SamplerEnsemble): buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble_parts.members_of_parts, checkpoints.copies.without_parts
_service_shutdown (attribute of ReplayBuffer): buffers.background.submit, buffers.sampling.sample
_set_index_in_td (function of TensorDictReplayBuffer):
    buffers.classes.TensorDictReplayBuffer._set_index_in_td, buffers.writes
_set_last_cursor (function of Storage): writers.ring.RoundRobinWriter._put_as_torchrl
_set_str (function of ATensorClass and TensorDictBase): buffers.sampling.put_info
_storage (attribute of ListStorage and ReplayBuffer and StoreStorage and TensorStorage and Writer):
    buffers.classes.TensorDictReplayBuffer.update_tensordict_priority,
    buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.conditional.ConditionalPriorityUpdates._maybe_make_writer,
    buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble.ReplayBufferEnsemble._init, buffers.parts.change_sampler,
    buffers.parts.change_storage, buffers.parts.change_writer, buffers.parts.leave_storage,
    buffers.recording.Records._table, buffers.recording.Records.mark_update,
    buffers.recording.Records.mark_written, buffers.sampling.read, buffers.sampling.sample,
    buffers.updates.update_sample, buffers.writes._is_direct, buffers.writes.assign,
    checkpoints.copies._copied, checkpoints.copies.arrive, checkpoints.copies.check_sendable,
    checkpoints.copies.copy_records, checkpoints.copies.has_files_in, checkpoints.copies.own_files,
    checkpoints.copies.rejoin, checkpoints.copies.without_parts,
    checkpoints.fit_records._check_list, checkpoints.fit_records._check_reshaped,
    checkpoints.fit_records._check_tensors, checkpoints.fit_records.check_records,
    checkpoints.fits, checkpoints.fits._check, checkpoints.fits._check_dumped_ensemble,
    checkpoints.fits._members, layout.grid.shape_of_records, processes.first_write.FirstWrite.set,
    processes.memory._places, processes.sharing.Sharing._move_records, processes.sharing._leaves,
    writers.columns.columns_of, writers.max_value.TensorDictMaxValueWriter._put,
    writers.max_value.TensorDictMaxValueWriter._ranking,
    writers.max_value.TensorDictMaxValueWriter.rank_what_ran_on,
    writers.max_value.TensorDictMaxValueWriter.register_storage, writers.records.check_records,
    writers.ring.RoundRobinWriter._abandon, writers.ring.RoundRobinWriter._generation,
    writers.ring.RoundRobinWriter._paired, writers.ring.RoundRobinWriter._put,
    writers.ring.RoundRobinWriter._put_as_torchrl, writers.ring.RoundRobinWriter._put_pairs,
    writers.ring.RoundRobinWriter._ring_write,
    writers.ring.RoundRobinWriter._update_storage_len_for_write_at,
    writers.ring.RoundRobinWriter.write_at, writers.stamping.StampingWriter._take_over,
    writers.stamping.StampingWriter.generations_of,
    writers.stamping.StampingWriter.register_storage, writers.stamping.StampingWriter.table,
    writers.tensordict_ring.TensorDictRoundRobinWriter._labels
_storages (attribute of StorageEnsemble): buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble_parts.members_of_parts, checkpoints.copies.without_parts
_sum_tree (attribute of PrioritizedSampler): buffers.sampling.unmask_leaves, checkpoints.samplers,
    core.trees._draws_plainly, core.trees._is_plain, core.trees._set, core.trees.draw,
    core.trees.refuse_past_the_end
_sync (attribute of PrioritizedReplayBuffer and TensorDictPrioritizedReplayBuffer):
    buffers.sampling.read, buffers.updates.needed_parts, buffers.writes._is_direct
_synchronize_futures_locked (function of ReplayBuffer):
    buffers.recording.Records._synchronize_futures_locked, processes.holding._futures
_td_dim_names (attribute of TensorDict): writers.columns.Columns.__init__,
    writers.columns.Columns.is_of
_tensordict (attribute of ATensorClass and TensorDict): checkpoints.files.check_tensordict,
    core.result.PriorityUpdateResult.of, writers.columns.Columns.__init__,
    writers.columns.Columns._pair, writers.columns.Columns.is_of, writers.columns.Columns.pairs,
    writers.columns._plain
_torchrl_checkpoint_detach_from_load_path (function of ReplayBuffer):
    checkpoints.saving.Saves.loads
_track_generations (attribute of RoundRobinWriter): buffers.parts.change_writer,
    launch.names.GuardedBuffer._switch_tracking
_transform (attribute of OfflineToOnlineReplayBuffer and ReplayBuffer):
    buffers.ensemble.ReplayBufferEnsemble.__getitem__, buffers.sampling.is_direct,
    buffers.writes._brought, buffers.writes._is_direct, buffers.writes._write,
    buffers.writes.assign, checkpoints.copies.rejoin, checkpoints.fits._check
_transforms (attribute of StorageEnsemble): buffers.ensemble_parts.members_of_parts,
    checkpoints.copies.rejoin, checkpoints.copies.without_parts, checkpoints.fits._check,
    checkpoints.fits._check_dumped_ensemble, checkpoints.fits._check_transform,
    checkpoints.fits._settings, checkpoints.fits.check_state
_update_executor (attribute of ReplayBuffer): buffers.background.submit,
    buffers.conditional._reset_in_child
_update_storage_len_for_write_at (function of RoundRobinWriter):
    writers.ring.RoundRobinWriter._update_storage_len_for_write_at
_validate_prefetch_state (function of ReplayBuffer): checkpoints.fits._check
_wait_for_init (function of TensorStorage): processes.sharing.Sharing.join_first_write
_write_count (property of RoundRobinWriter and TensorDictMaxValueWriter and WriterEnsemble):
    buffers.writes._forget_written, buffers.writes._write, checkpoints.fit_parts._read_writer,
    checkpoints.fit_parts.check_writer, writers.max_value.TensorDictMaxValueWriter.__init__,
    writers.max_value.TensorDictMaxValueWriter._count,
    writers.max_value.TensorDictMaxValueWriter._empty,
    writers.max_value.TensorDictMaxValueWriter._ranking,
    writers.max_value.TensorDictMaxValueWriter.add,
    writers.max_value.TensorDictMaxValueWriter.extend,
    writers.max_value.TensorDictMaxValueWriter.load_state_dict,
    writers.max_value.TensorDictMaxValueWriter.loads,
    writers.max_value.TensorDictMaxValueWriter.state_dict, writers.ring.RoundRobinWriter._abandon,
    writers.ring.RoundRobinWriter._empty, writers.ring.RoundRobinWriter._put_as_torchrl,
    writers.ring.RoundRobinWriter._put_pairs, writers.ring.RoundRobinWriter._ring_write,
    writers.ring.RoundRobinWriter.write_at
_write_count_value (attribute of RoundRobinWriter and TensorDictMaxValueWriter): processes.sharing,
    processes.sharing.Sharing.install_writer_cells
_write_lock (attribute of ReplayBuffer): buffers.background.submit,
    buffers.conditional.ConditionalPriorityUpdates.reset_stats,
    buffers.recording.Records._initialize_prioritized_sampler, core.table.SlotGenerations.adopt
_writer (attribute of ReplayBuffer):
    buffers.classes.TensorDictReplayBuffer.update_tensordict_priority,
    buffers.conditional.ConditionalPriorityUpdates._init,
    buffers.conditional.ConditionalPriorityUpdates.set_storage,
    buffers.ensemble.ReplayBufferEnsemble._check_all_track,
    buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble.ReplayBufferEnsemble._init, buffers.ensemble.ReplayBufferEnsemble.extend,
    buffers.parts._bind, buffers.parts.change_sampler, buffers.parts.change_storage,
    buffers.sampling.read, buffers.updates.are_possible, buffers.updates.needed_parts,
    buffers.writes._is_direct, buffers.writes._take_steps, buffers.writes._write,
    buffers.writes.empty, buffers.writes.write, checkpoints.copies.rejoin,
    checkpoints.copies.without_parts, checkpoints.fit_parts._read_writer,
    checkpoints.fit_parts.check_writer, checkpoints.fit_parts.writer_state, checkpoints.fits,
    checkpoints.fits._check, checkpoints.fits.check_state,
    checkpoints.saving.Saves.load_state_dict, checkpoints.saving._note_that_records_ran_on,
    processes.sharing.Sharing._late_writer, processes.sharing.Sharing.install_cells
_writers (attribute of WriterEnsemble): buffers.ensemble.ReplayBufferEnsemble._follow_members,
    buffers.ensemble.ReplayBufferEnsemble._maybe_make_writer,
    buffers.ensemble_parts.members_of_parts, buffers.ensemble_writer.WriterEnsemble.__getitem__,
    buffers.ensemble_writer.WriterEnsemble.__init__,
    buffers.ensemble_writer.WriterEnsemble._not_tracking,
    buffers.ensemble_writer.WriterEnsemble.generations_of, checkpoints.copies.without_parts
torch.utils._pytree.tree_flatten (function of torch.utils._pytree): writers.records
torch.utils._pytree.tree_leaves (function of torch.utils._pytree): checkpoints.fit_records,
    layout.grid, processes.memory, processes.sharing, writers.records
torch.utils._pytree.tree_map (function of torch.utils._pytree): buffers.sampling,
    checkpoints.copies, writers.records
torchrl._utils.accept_remote_rref_invocation (function of torchrl._utils): remote.rpc
torchrl.data.replay_buffers.replay_buffers._maybe_delay_init (function of
    torchrl.data.replay_buffers.replay_buffers): buffers.classes, buffers.conditional,
    buffers.ensemble, buffers.recording, checkpoints.saving
torchrl.data.replay_buffers.utils._reduce (function of torchrl.data.replay_buffers.utils):
    buffers.sequence, core.update
"""

PACKAGE = Path(generations.__path__[0])
COMMAND = f"{Path(sys.executable).name} {Path(*Path(__file__).parts[-3:])}"


class ATensorClass(TensorClass):
    x: torch.Tensor


# ------------------------------------------------------------------ what TorchRL has


def bases_of(classes: Any, *packages: str) -> set[type]:
    bases = {base for cls in classes if inspect.isclass(cls) for base in cls.__mro__}
    return {cls for cls in bases if cls.__module__.startswith(packages)}


# A name that a former group defines is not looked for in a later one.
GROUPS: list[set[type]] = [
    bases_of((getattr(replay_buffers, name) for name in replay_buffers.__all__), "torchrl."),
    bases_of([*vars(ray_buffer).values(), ReplayBufferTrainer], "torchrl."),
    bases_of([TensorDict, MemoryMappedTensor], "tensordict.") | {ATensorClass},
    {type(threading.RLock())},
]
OURS = f"{generations.__name__}."
# Attributes of our own parts that classes of TorchRL's, which are never in their place, have too.
NAMESAKES = {"_depth", "_lock"}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_(?!_)\w+", name) is not None


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"


def kind_of(value: Any) -> str:
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return "class"
    if inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod)):
        return "function"
    return "property" if hasattr(value, "__get__") else "attribute"


@functools.cache
def classes_in(file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(file).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def attributes_set_in(cls: type) -> Iterator[str]:
    """The attributes that the methods of a class set on ``self``."""
    functions = [getattr(value, "fget", None) or value for value in vars(cls).values()]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    # TorchRL moves its classes to other modules by name, where inspect does not find them.
    for file in {code.co_filename for code in codes if code is not None}:
        definition = classes_in(file).get(cls.__name__) if file.endswith(".py") else None
        for node in ast.walk(definition or ast.Module([], [])):
            if is_of_self(node) and isinstance(node.ctx, ast.Store):
                yield node.attr


@functools.cache
def private_names_of(cls: type) -> dict[str, str]:
    """The kind of each private name that a class defines, without those of its bases."""
    names = dict.fromkeys([*attributes_set_in(cls), *vars(cls).get("__annotations__", {})])
    kinds = dict.fromkeys(names, "attribute") | {
        name: kind_of(value) for name, value in vars(cls).items()
    }
    if cls is ATensorClass:
        kinds |= dict.fromkeys(vars(ATensorClass(x=torch.zeros(1), batch_size=[1])), "attribute")
    return {name: kind for name, kind in kinds.items() if is_private(name)}


def owners(name: str, among: set[type]) -> dict[str, str]:
    """Whose a name is, and as what: of the classes that have it, those whose bases do not."""
    having = {cls for cls in among if name in private_names_of(cls)}
    first = {cls for cls in having if not having & set(cls.__mro__[1:])}
    return {cls.__name__: private_names_of(cls)[name] for cls in first}


def whose(name: str) -> dict[str, str]:
    if "." in name:
        module, _, name = name.rpartition(".")
        there = getattr(importlib.import_module(module), name, None)
        return {} if there is None else {module: kind_of(there)}
    for group in GROUPS:
        if found := owners(name, group):
            return found
    return {"ray_buffer": kind_of(getattr(ray_buffer, name))} if hasattr(ray_buffer, name) else {}


# ------------------------------------------------------------------ what we use


def family(cls: type) -> set[type]:
    """The bases of a class of ours, also those that only its subclasses have, as a mix-in's do."""
    found = set(cls.__mro__)
    for subclass in type.__subclasses__(cls):
        found |= family(subclass)
    return {base for base in found if not f"{base.__module__}.".startswith(OURS)}


def named_in(node: ast.AST, cls: Any) -> Iterator[str]:
    """The private names of TorchRL's that a node uses, in a class of ours or outside of one."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        for name in node.names:
            if any(map(is_private, [*node.module.split("."), name.name])):
                yield f"{node.module}.{name.name}"
    elif inspect.isclass(cls) and (is_of_self(node) or isinstance(node, ast.FunctionDef)):
        name = node.attr if isinstance(node, ast.Attribute) else node.name  # or an override
        if is_private(name) and owners(name, family(cls)):
            yield name
    else:
        name = getattr(node, "attr", None) or getattr(node, "value", None)
        if isinstance(name, str) and is_private(name) and name not in NAMESAKES and whose(name):
            yield name


def uses_in(module: Any) -> Iterator[tuple[str, str]]:
    """Each private name of TorchRL's in a module of ours, and the function that uses it."""

    def visit(node: ast.AST, within: tuple[str, ...], cls: Any) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and len(within) < 2:
            within = (*within, node.name)
        for name in named_in(node, cls):
            yield name, ".".join([module.__name__.removeprefix(OURS), *within])
        if isinstance(node, ast.ClassDef):
            cls = getattr(module, node.name, None)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, within, cls)

    yield from visit(ast.parse(Path(module.__file__).read_text()), (), None)


@functools.cache
def collected() -> dict[str, tuple[str, ...]]:
    """The functions that use each private name of TorchRL's."""
    found = defaultdict(set)
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(generations.__path__, OURS)
    ]
    for module in modules:
        for name, place in uses_in(module):
            found[name].add(place)
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}


# ------------------------------------------------------------------ the table


def line(name: str, places: tuple[str, ...]) -> str:
    by_kind = defaultdict(list)
    for owner, kind in sorted(whose(name).items()):
        by_kind[kind].append(owner)
    what = ", ".join(f"{kind} of {' and '.join(of)}" for kind, of in by_kind.items())
    text = f"{name} ({what}): {', '.join(places)}"
    return textwrap.fill(text, 99, subsequent_indent="    ", break_long_words=False)


def rows() -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    """What ``TABLE`` says of each name: the kind by owner, and the functions that use it."""
    found = {}
    for row in TABLE.replace("\n    ", " ").strip().splitlines():
        name, what, places = re.fullmatch(r"(\S+) \((.*)\): (.*)", row).groups()
        kinds = {}
        for part in what.split(", "):
            kind, of = part.split(" of ")
            kinds |= dict.fromkeys(of.split(" and "), kind)
        found[name] = kinds, tuple(places.split(", "))
    return found


ROWS = rows()


@pytest.mark.parametrize("name", ROWS)
def test_a_private_name_is_what_it_was(name):
    was, places = ROWS[name]
    now = whose(name)
    for owner, kind in was.items():
        assert now.get(owner) == kind, (
            f"{name} was a {kind} of {owner}: now {now or 'nobody has it'}. "
            f"This breaks {', '.join(places)}."
        )


def test_the_table_has_every_private_name_that_the_package_uses_and_where():
    listed = {name: places for name, (_, places) in ROWS.items()}
    found = collected()
    differing = {
        name: f"listed in {listed.get(name, ())}, used in {found.get(name, ())}"
        for name in {*listed, *found}
        if listed.get(name) != found.get(name)
    }
    assert not differing, f"Look at these, then run: {COMMAND}"


def test_what_private_names_hold_is_what_we_take_it_for():
    rb = torchrl.data.TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), sync=False
    )
    sampler = rb._prioritized_sampler
    assert isinstance(rb._storage._attached_entities, list)
    assert sampler._max_priority_within_buffer is False
    assert sampler._sum_tree.size == 8
    assert not hasattr(sampler._sum_tree, "device")
    writer = torchrl.data.TensorDictMaxValueWriter()
    assert writer._write_count == 0  # makes the value that counts
    assert writer._write_count_value.value == 0


def write_table() -> None:
    file = Path(__file__)
    table = "\n".join(line(name, places) for name, places in collected().items())
    before, rest = file.read_text().split('\nTABLE = """\n', maxsplit=1)
    _, after = rest.split('"""\n', maxsplit=1)
    file.write_text(f'{before}\nTABLE = """\n{table}\n"""\n{after}')


if __name__ == "__main__":
    write_table()
