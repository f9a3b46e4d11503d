"""Tries every combination of storage, sampler, writer and sample unit, and writes the page of them.

``python test/docs/combinations.py`` writes it anew; test_combinations.py compares.
"""

from __future__ import annotations

import itertools
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl._utils import logger
from torchrl.data import replay_buffers as stock
from torchrl.data.replay_buffers import generations

PAGE = Path(__file__).parents[2] / "docs/source/reference/combinations.rst"
PACKAGE = Path(generations.__path__[0])
SLOTS, LANES, BATCH = 8, 2, 4
ROUNDS = 8  # a sampler that reads past the end does not at every draw
PER = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}


def records(shape: tuple[int, ...], rank: int = 0) -> TensorDict:
    """Steps in episodes of four, in lanes beside each other; a max-value writer sees the rank."""
    at = torch.arange(SLOTS).reshape(-1, *(1,) * (len(shape) - 1)).expand(shape).clone()
    return TensorDict(
        {
            "id": at,
            "episode": at // 4,
            "rank": torch.full(shape, rank),
            "policy_version": torch.zeros(shape, dtype=torch.int64),
            "next": TensorDict({"done": (at % 4 == 3).unsqueeze(-1)}, shape),
        },
        shape,
    )


class Kind(NamedTuple):
    """A storage: how to make it, and the shape of what fills it."""

    make: Callable[[], stock.Storage]
    shape: tuple[int, ...] = (SLOTS,)


GRID = (SLOTS, LANES)
STORAGES = {
    "ListStorage": Kind(lambda: stock.ListStorage(SLOTS)),
    "LazyStackStorage": Kind(lambda: stock.LazyStackStorage(SLOTS)),
    "CompressedListStorage": Kind(lambda: stock.CompressedListStorage(SLOTS)),
    "TensorStorage": Kind(lambda: stock.TensorStorage(records((SLOTS,)))),
    "TensorStorage, ndim=2": Kind(lambda: stock.TensorStorage(records(GRID), ndim=2), GRID),
    "LazyTensorStorage": Kind(lambda: stock.LazyTensorStorage(SLOTS)),
    "LazyTensorStorage, ndim=2": Kind(lambda: stock.LazyTensorStorage(SLOTS * LANES, ndim=2), GRID),
    "LazyTensorStorage, ndim=3": Kind(
        lambda: stock.LazyTensorStorage(SLOTS * LANES, ndim=3), (SLOTS, LANES, 1)
    ),
    "LazyMemmapStorage": Kind(lambda: stock.LazyMemmapStorage(SLOTS)),
    "LazyMemmapStorage, ndim=2": Kind(lambda: stock.LazyMemmapStorage(SLOTS * LANES, ndim=2), GRID),
}
SLICES = {"slice_len": 2, "traj_key": "episode"}
SAMPLERS: dict[str, Callable[[int], stock.Sampler]] = {
    "PrioritizedSampler": lambda cells: stock.PrioritizedSampler(cells, **PER),
    "PrioritizedSliceSampler": lambda cells: stock.PrioritizedSliceSampler(cells, **PER, **SLICES),
    "RandomSampler": lambda _: stock.RandomSampler(),
    "SamplerWithoutReplacement": lambda _: stock.SamplerWithoutReplacement(),
    "ConsumingSampler": lambda _: stock.ConsumingSampler(max_sample_count=100),
    "StalenessAwareSampler": lambda _: stock.StalenessAwareSampler(),
    "PromptGroupSampler": lambda _: stock.PromptGroupSampler(num_groups=2, group_key="episode"),
    "SliceSampler": lambda _: stock.SliceSampler(**SLICES),
    "SliceSamplerWithoutReplacement": lambda _: stock.SliceSamplerWithoutReplacement(**SLICES),
    "StreamingSliceSampler": lambda _: stock.StreamingSliceSampler(**SLICES),
}
WRITERS: dict[str, tuple[Callable[[], stock.Writer], Callable[[], stock.Writer]]] = {
    # ours, and TorchRL's without stamps
    "RoundRobinWriter": (
        lambda: generations.RoundRobinWriter(track_generations=True),
        stock.RoundRobinWriter,
    ),
    "TensorDictRoundRobinWriter": (
        lambda: generations.TensorDictRoundRobinWriter(track_generations=True),
        stock.TensorDictRoundRobinWriter,
    ),
    "TensorDictMaxValueWriter": (
        lambda: generations.TensorDictMaxValueWriter(rank_key="rank", track_generations=True),
        lambda: stock.TensorDictMaxValueWriter(rank_key="rank"),
    ),
    "TorchRL's TensorDictMaxValueWriter": (
        lambda: stock.TensorDictMaxValueWriter(rank_key="rank"),
        lambda: stock.TensorDictMaxValueWriter(rank_key="rank"),
    ),
    "ImmutableDatasetWriter": (stock.ImmutableDatasetWriter, stock.ImmutableDatasetWriter),
}
UNITS: dict[str, Callable[[], stock.SampleUnit]] = {
    "Transition": stock.Transition,
    "Sequence": lambda: stock.Sequence(length=2),
}

UPDATES, STAMPS, PLAIN, REFUSED, NOWHERE = "updates", "stamps", "plain", "refused", "error"
MEANING = {
    UPDATES: "a sample's conditional update writes each of its priorities, and after the records "
    "were replaced none",
    STAMPS: "samples carry stamps, by which ``is_live`` tells what was replaced; there are no "
    "priorities, and a conditional update is refused",
    PLAIN: "works as in TorchRL, without stamps; a conditional update is refused",
    REFUSED: "refused by this package, for the reason that the number names",
    NOWHERE: "TorchRL itself raises an error",
}


def attempt(buffer: Any, storage: Kind, writer: Any, **parts: Any) -> str:
    """Fills, samples, updates, and replaces all records, and says how far the combination goes."""
    torch.manual_seed(0)
    np.random.seed(0)
    kept = storage.make()
    immutable = isinstance(writer, stock.ImmutableDatasetWriter)
    if immutable:
        kept.set(torch.arange(SLOTS), records(storage.shape))
    cells = torch.Size(storage.shape).numel()
    sampler = parts.pop("sampler")(cells)
    rb = buffer(
        storage=kept, writer=writer, sampler=sampler, batch_size=BATCH, dim_extend=0, **parts
    )
    if not immutable:
        rb.extend(records(storage.shape))
    for _ in range(ROUNDS):
        sample = rb.sample()
    if buffer is not generations.TensorDictReplayBuffer:
        return PLAIN
    sample.set("td_error", torch.full(sample.shape, 5.0))
    if not writer.tracks_generations:
        refuses(rb, sample, "needs stamps")
        return PLAIN
    of_anchor = isinstance(rb._sample_unit, stock.Sequence)
    prefix = "anchor" if of_anchor else "index"
    index = sample["anchor_index" if of_anchor else "index"]
    handles = (
        index.unbind(-1) if kept.ndim > 1 else index.reshape(len(index), -1)[:, 0],
        sample[f"{prefix}_generation"].reshape(len(index), -1)[:, 0],
    )
    table = generations.SlotGenerations.attach(kept)
    assert table.is_live(*handles).all()
    if not isinstance(sampler, stock.PrioritizedSampler):
        refuses(rb, sample, "needs priorities")
        rb.extend(records(storage.shape, rank=1))
        assert not table.is_live(*handles).any()
        return STAMPS
    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [True] * len(
        index
    )
    numbers = handles[0] if kept.ndim == 1 else table.layout.rows(torch.stack(handles[0], -1))
    expected = torch.ones(cells)
    expected[numbers] = 5.0
    assert leaves(sampler) == expected.tolist()
    sampler._max_priority = None  # new records get a leaf of 1
    rb.extend(records(storage.shape, rank=1))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 0
    assert leaves(sampler) == [1.0] * cells
    return UPDATES


def leaves(sampler: stock.PrioritizedSampler) -> list[float]:
    return sampler._sum_tree[torch.arange(sampler.max_size)].tolist()


def refuses(rb: Any, sample: TensorDict, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        rb.update_tensordict_priority_if_present(sample)


def outcome(storage: str, sampler: str, writer: str, unit: str) -> tuple[str, str]:
    """What comes of a combination, and if it is refused, why."""
    kind, (ours, theirs) = STORAGES[storage], WRITERS[writer]
    parts = {"sampler": SAMPLERS[sampler], "sample_unit": UNITS[unit]()}
    try:
        return attempt(generations.TensorDictReplayBuffer, kind, ours(), **parts), ""
    except AssertionError:
        raise
    except Exception as error:
        refusal = error
    parts["sample_unit"] = UNITS[unit]()
    try:
        attempt(stock.TensorDictReplayBuffer, kind, theirs(), **parts)
    except Exception:
        return NOWHERE, ""
    # TorchRL can. So it must be this package that says no, and say it clearly.
    raised_in = Path(traceback.extract_tb(refusal.__traceback__)[-1].filename)
    if PACKAGE not in raised_in.parents or not isinstance(refusal, (ValueError, TypeError)):
        raise AssertionError((storage, sampler, writer, unit)) from refusal
    return REFUSED, f"``{type(refusal).__name__}``: {refusal}"


def matrix() -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """The outcome of every combination of storage, sampler, writer and unit."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            keys = itertools.product(STORAGES, SAMPLERS, WRITERS, UNITS)
            return {key: outcome(*key) for key in keys}
    finally:
        logger.setLevel(level)


# What the matrix does not try, and what there is to say about it.
_POSITIONS = "tried by its own test: records come back into their slots, with their handles"
_READS = "reads records, and neither writes them nor holds handles"
OTHERS = {
    "ReplayBuffer": "has a counterpart of the same name here",
    "PrioritizedReplayBuffer": "has a counterpart of the same name here",
    "TensorDictReplayBuffer": "has a counterpart of the same name here",
    "TensorDictPrioritizedReplayBuffer": "has a counterpart of the same name here",
    "ReplayBufferEnsemble": "has a counterpart of the same name here, of this package's buffers on "
    "storages of one dimension; others are refused (``TypeError``, ``ValueError``)",
    "SamplerEnsemble": "belongs to ``ReplayBufferEnsemble``",
    "WriterEnsemble": "has a counterpart of the same name here",
    "RayReplayBuffer": "has a counterpart of the same name here",
    "RemoteTensorDictReplayBuffer": "has a counterpart of the same name here",
    "HERReplayBuffer": "``class Mine(ConditionalPriorityUpdates, HERReplayBuffer)`` carries "
    "stamps: it relabels what it samples, and stores nothing",
    "OfflineToOnlineReplayBuffer": "makes TorchRL buffers of its own, without stamps or priorities",
    "ConditionalUpdateResult": "what ``update_if_present`` returns, which works here as in TorchRL",
    "StoreStorage": "refused (``TypeError``) when it is to be tracked",
    "StorageEnsemble": "refused (``TypeError``) when it is to be tracked; belongs to "
    "``ReplayBufferEnsemble``",
    "Storage": "a user's own class is refused (``TypeError``) when it is to be tracked",
    "Sampler": "a user's own class works: priorities need a ``PrioritizedSampler``",
    "Writer": "a user's own class is stamped by the buffer if it is a tracking writer of this "
    "package; else it works without stamps",
    "SampleUnit": "a user's own class works: each of its records is a handle of its own",
    "StorageCheckpointerBase": "see the checkpointers below",
    "TensorStorageCheckpointer": _POSITIONS,
    "FlatStorageCheckpointer": _POSITIONS,
    "NestedStorageCheckpointer": _POSITIONS,
    "H5StorageCheckpointer": "needs h5py; not tried",
    "ListStorageCheckpointer": "TorchRL itself dumps no list; use ``state_dict``",
    "CompressedListStorageCheckpointer": _POSITIONS,
    "StorageEnsembleCheckpointer": "belongs to ``ReplayBufferEnsemble``",
    "HindsightStrategy": "an option of ``HERReplayBuffer``",
    "Trajectory": _READS,
    "TrajectoryPredicate": _READS,
    "traj": _READS,
    "filter_trajectories": _READS,
    "iter_trajectories": _READS,
    "find_start_stop_traj": _READS,
    "DEFAULT_DONE_KEYS": "the keys that end an episode",
    "prefill_replay_buffer": "calls ``extend``, so its records get stamps",
    **{name: "a hook of the checkpointers" for name in ("TED2Flat", "Flat2TED", "TED2Nested")},
    **{name: "a hook of the checkpointers" for name in ("Nested2TED", "H5Split", "H5Combine")},
}


def page() -> str:
    """The page in the reference."""
    outcomes = matrix()
    reasons = list(dict.fromkeys(reason for _, reason in outcomes.values() if reason))
    lines = [
        ".. This file is written by test/docs/combinations.py; test_combinations.py compares.",
        "",
        ".. _ref_buffers_generations_combinations:",
        "",
        "What works with what",
        "====================",
        "",
        "Each combination of storage, sampler, writer and sample unit was tried on a",
        "``TensorDictReplayBuffer`` of this package: it was filled and sampled, the sample's",
        "priorities were written, all records were replaced, and the same priorities came again.",
        "TorchRL's own ring writers with ``track_generations=True`` stamp after the data, and are",
        "refused everywhere (``ValueError``).",
        "",
    ]
    for word, meaning in MEANING.items():
        lines += [f"- *{word}*: {meaning}."]
    for writers, unit in itertools.product(_alike(outcomes), UNITS):
        names = ", ".join(f"``{name}``" for name in writers)
        title = f"{names}, unit ``{unit}``"
        lines += ["", title, "-" * len(title), ""]
        lines += [".. csv-table::", "   :header-rows: 1", "   :stub-columns: 1", ""]
        lines += [_row(["", *(f"``{name}``" for name in STORAGES)])]
        for sampler in SAMPLERS:
            found = [outcomes[storage, sampler, writers[0], unit] for storage in STORAGES]
            cells = [
                f"{word} ({reasons.index(reason) + 1})" if reason else word
                for word, reason in found
            ]
            lines += [_row([f"``{sampler}``", *cells])]
    lines += ["", "Why it is refused", "-----------------", ""]
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    lines += ["", "Every public name of torchrl.data.replay_buffers", "-" * 48, ""]
    for name in sorted(stock.__all__, key=str.lower):
        lines += [f"- ``{name}``: {OTHERS.get(name) or _place_in_the_matrix(name)}."]
    return "\n".join([*lines, ""])


def _alike(outcomes: dict[tuple[str, str, str, str], tuple[str, str]]) -> list[list[str]]:
    """Writers with the same outcomes throughout."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for writer in WRITERS:
        keys = itertools.product(STORAGES, SAMPLERS, UNITS)
        found = tuple(outcomes[storage, sampler, writer, unit] for storage, sampler, unit in keys)
        groups.setdefault(found, []).append(writer)
    return list(groups.values())


def _row(cells: list[str]) -> str:
    return "   " + ", ".join(f'"{cell}"' if "," in cell else cell or '""' for cell in cells)


def _place_in_the_matrix(name: str) -> str:
    for kinds, what in (
        (STORAGES, "a storage"),
        (SAMPLERS, "a sampler"),
        (WRITERS, "a writer"),
        (UNITS, "a sample unit"),
    ):
        if any(name in kind for kind in kinds):
            return f"{what}, see the tables"
    raise KeyError(f"{name} stands neither in the matrix nor among the others")


if __name__ == "__main__":
    PAGE.write_text(page())
