"""Dumps are one whole: for readers and dumpers of several processes, whoever is killed where."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from common import CAPACITY, Thread, ids, td_buffer
from torchrl.data import LazyMemmapStorage
from torchrl.data.replay_buffers.generations.checkpoints import dumps

PARTS = {
    "storage/records": 0,
    "writer/metadata.json": 1,
    "buffer_metadata.json": 2,
}


def put(folder, text, **more):
    """A dump of which every file says the same."""
    for name in (*PARTS, *more):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(text))


def dump(place, text, **more):
    with dumps.replacing(place) as folder:
        put(folder, text, **more)


def said(place, **kwargs):
    """What every file of a dump says, as a set of one; a mixed dump has two."""
    with dumps.opened(place, **kwargs) as folder:
        return {json.loads((folder / name).read_text()) for name in listing(folder)}


def listing(folder):
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    return sorted(name for name in names if name != dumps.MANIFEST)


def tree(folder):
    """All of a folder: names, inodes and times, so that no touch goes unseen."""
    return {
        str(file): (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        for file in [folder, *folder.rglob("*")]
        for stat in [file.lstat()]
    }


@pytest.fixture
def place(tmp_path):
    return tmp_path / "dump"


# ------------------------------------------------------------------ a kill, a failure

STEPS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def stop_at(step, stop, names=STEPS):
    """Calls ``stop`` in the place of one of the calls that alter the disk, counted from 0."""
    calls = iter(range(10_000))

    def counted(inner):
        def call(*args, **kwargs):
            if next(calls) == step:
                stop()
            return inner(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, counted(getattr(os, name)))


def dump_and_die(place, step):
    stop_at(step, lambda: os._exit(9))
    dump(place, "new", **{"writer/new": 0})
    os._exit(0)


def test_a_kill_at_any_step_leaves_the_earlier_dump_or_the_new_one(place):
    context = multiprocessing.get_context("fork")
    found, step, code = [], 0, 9
    while code == 9:
        dump(place, "old", **{"rng_state/meta.json": 0})
        process = context.Process(target=dump_and_die, args=(place, step))
        process.start()
        process.join(30)
        code = process.exitcode
        before = tree(place)
        (text,) = said(place)
        found.append(text)
        assert tree(place) == before  # a reader writes nothing
        dump(place, "next")
        assert said(place) == {"next"}
        assert listing(place) == sorted(PARTS)
        assert not (place / "rng_state").exists()  # TorchRL would take it for a part
        step += 1
    assert code == 0
    assert step > 20  # each call that alters the disk was one that killed
    first = found.index("new")
    assert found == ["old"] * first + ["new"] * (len(found) - first)
    assert 0 < first < len(found) - 10  # kills while files are moved, too


def test_a_dump_that_fails_leaves_the_earlier_one_and_nothing_behind(place, monkeypatch):
    reached = []
    names = [name for name in STEPS if name != "mkdir"]  # of a folder that is there, it may fail

    def fail():
        reached.append(True)
        raise OSError(28, "No space left on device")

    found, step = [], 0
    while len(reached) == step:
        dump(place, "old")
        before = listing(place)
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, getattr(os, name))  # so that it is set back
            stop_at(step, fail, names)
            with contextlib.suppress(OSError):
                dump(place, "new")
        (text,) = said(place)
        found.append(text)
        if text == "old":
            assert listing(place) == before
        step += 1
    first = found.index("new")
    assert found == ["old"] * first + ["new"] * (len(found) - first)
    assert 5 < first < len(found) - 5


class Failed(Exception):
    pass


def test_a_first_dump_that_fails_takes_its_folder_away_again(place):
    with contextlib.suppress(Failed), dumps.replacing(place) as folder:
        put(folder, "new")
        raise Failed
    assert not place.exists()


def test_a_dump_in_place_that_was_interrupted_is_refused_until_the_next_one(place):
    dump(place, "old")
    with contextlib.suppress(Failed), dumps.rewriting(place) as folder:
        assert folder == place
        put(folder, "new")
        raise Failed
    with pytest.raises(RuntimeError, match="not whole: it was interrupted"):
        said(place)
    with dumps.rewriting(place) as folder:
        put(folder, "new")
    assert said(place, directly=True) == {"new"}


def test_what_a_dead_dumper_left_is_removed_and_what_a_live_one_writes_is_not(place):
    dump(place, "old")
    (place / (dumps._INCOMING + "dead")).mkdir()
    with dumps.replacing(place) as live:
        put(live, "live")
        Thread(lambda: dump(place, "other")).join()
        assert said(place) == {"other"}
        assert [file.name for file in place.glob(dumps._INCOMING + "*")] == [live.name]
    assert said(place) == {"live"}
    assert listing(place) == sorted(PARTS)


# ------------------------------------------------------------------ readers and dumpers at once


def is_free(place, how):
    """Whether another process would get the lock of a place at once."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def asked(monkeypatch):
    """Set when the thread that is in ``asked.by`` asks for the lock of a place."""
    event, inner = threading.Event(), dumps._flock

    def flock(folder, descriptor, how):
        if not how & fcntl.LOCK_NB and threading.current_thread() in event.by:
            event.set()
        inner(folder, descriptor, how)

    event.by = []
    monkeypatch.setattr(dumps, "_flock", flock)
    return event


def waiting(asked, target):
    """A thread that has asked for the lock."""
    started = threading.Event()
    thread = Thread(lambda: started.wait(30) and target())
    asked.by.append(thread)
    started.set()
    assert asked.wait(30)
    return thread


def test_a_dump_waits_for_the_end_of_a_load(place, asked):
    dump(place, "old")
    with dumps.opened(place) as folder:
        dumping = waiting(asked, lambda: dump(place, "new"))
        assert not is_free(place, fcntl.LOCK_EX)
        assert is_free(place, fcntl.LOCK_SH)
        assert {(folder / name).read_text() for name in PARTS} == {'"old"'}
    dumping.join()
    assert said(place) == {"new"}


def test_a_load_waits_while_a_dumper_moves_its_files(place, asked, monkeypatch):
    dump(place, "old")
    moving, go_on, inner = threading.Event(), threading.Event(), os.replace

    def replace(old, new):
        inner(old, new)
        if dumps._COMPLETE in str(old):
            moving.set()
            assert go_on.wait(30)

    monkeypatch.setattr(os, "replace", replace)
    dumping = Thread(lambda: dump(place, "new"))
    assert moving.wait(30)
    assert {(place / name).read_text() for name in PARTS} == {'"old"', '"new"'}
    loading = waiting(asked, lambda: said(place))
    assert not is_free(place, fcntl.LOCK_SH)
    go_on.set()
    assert loading.join() == {"new"}
    dumping.join()


def test_loads_do_not_wait_for_each_other(place):
    dump(place, "old")
    with dumps.opened(place):
        assert Thread(lambda: said(place)).join() == {"old"}


def test_a_child_that_was_forked_in_a_load_does_not_keep_the_lock(place):
    dump(place, "old")
    read, write = os.pipe()
    with dumps.opened(place):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # lives until the parent is done
            os._exit(0)
    Thread(lambda: dump(place, "new")).join()
    assert said(place) == {"new"}
    os.close(write)
    os.waitpid(child, 0)


def test_a_thread_that_dumps_where_it_loads_is_refused_in_place_of_waiting_for_itself(place):
    dump(place, "old")
    with dumps.opened(place), pytest.raises(RuntimeError, match=r"of this thread in .* under way"):
        dump(place, "new")
    assert said(place) == {"old"}
    dump(place, "new")


def dump_again_and_again(path, first, stop):
    torch.set_num_threads(1)
    rb = td_buffer(0, storage=LazyMemmapStorage(CAPACITY))
    made = 0
    while not stop.is_set():
        rb.extend(ids(range(first, first + CAPACITY)))
        rb.dumps(path)
        first += CAPACITY
        made += 1
    return made


def dumper(path, first, stop, pipe):
    try:
        pipe.send(dump_again_and_again(path, first, stop))
    except BaseException as error:
        pipe.send(repr(error))


@pytest.mark.parametrize("loads", [60, pytest.param(1500, marks=pytest.mark.stress)])
def test_loads_beside_two_dumping_processes_are_whole(loads, place):
    context = multiprocessing.get_context("fork")
    td_buffer(storage=LazyMemmapStorage(CAPACITY)).dumps(place)
    stop, wrong, seen = context.Event(), 0, set()
    pipes, processes = [], []
    for number in (1, 2):
        ours, theirs = context.Pipe()
        arguments = (place, number * 1_000_000, stop, theirs)
        processes.append(context.Process(target=dumper, args=arguments, daemon=True))
        pipes.append(ours)
        processes[-1].start()
    for _ in range(loads):
        rb = td_buffer(0)
        rb.loads(place)
        records = rb[:]["id"].tolist()
        seen.add(records[0])
        of_one_dump = records == list(range(records[0], records[0] + CAPACITY))
        # The stamp of a record is the lap that wrote it: records and stamps are of one dump.
        lap = records[0] % 1_000_000 // CAPACITY
        stamps = rb.writer.generations_of(range(CAPACITY)).tolist()
        wrong += not of_one_dump or stamps != [lap] * CAPACITY
    stop.set()
    made = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    assert wrong == 0
    assert all(isinstance(count, int) and count > 2 for count in made), made
    assert len(seen) > loads // 4  # there was something to mix up


def dump_for_ever(path, first, started):
    torch.set_num_threads(1)
    rb = td_buffer(0, storage=LazyMemmapStorage(CAPACITY), sync=False)
    rb.extend(ids(range(first, first + CAPACITY)))
    started.set()
    while True:
        rb.dumps(path)


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.stress)])
@pytest.mark.timeout(600)
def test_an_earlier_dump_loads_whenever_the_process_is_killed_while_it_dumps(kills, place):
    generator = torch.Generator().manual_seed(0)
    context = multiprocessing.get_context("fork")
    td_buffer(storage=LazyMemmapStorage(CAPACITY), sync=False).dumps(place)
    (place / "notes.txt").write_text("not ours")
    (place / "storage" / "notes.json").write_text("?")
    earlier = 0
    for kill in range(1, kills + 1):
        started = context.Event()
        arguments = (place, 100 * kill, started)
        process = context.Process(target=dump_for_ever, args=arguments, daemon=True)
        process.start()
        assert started.wait(20)
        time.sleep(float(torch.rand((), generator=generator)) * 0.05)
        process.kill()
        process.join()
        loaded = td_buffer(0, storage=LazyMemmapStorage(CAPACITY), sync=False)
        loaded.loads(place)
        records = loaded[:]["id"].tolist()
        assert records[0] in (earlier, 100 * kill)
        earlier = records[0]
        assert records == list(range(earlier, earlier + CAPACITY))
        assert loaded._table.is_live(range(CAPACITY), [0] * CAPACITY).all()
    assert (place / "notes.txt").read_text() == "not ours"
    assert (place / "storage" / "notes.json").read_text() == "?"


# ------------------------------------------------------------------ what stands in a place

HOSTILE = [
    "../outside",
    "../../outside",
    "storage/../../outside",
    "storage/./records",
    "storage//records",
    "",
    ".",
    dumps.MANIFEST,
    dumps._COMPLETE + "/storage",
    dumps._INCOMING + "1/storage",
    "link/outside",
]


@pytest.fixture
def outside(tmp_path, place):
    """A file beside the place, and a link to its folder in there."""
    dump(place, "old")
    (tmp_path / "outside").write_text("not ours")
    (place / "link").symlink_to(tmp_path)
    return tmp_path / "outside"


@pytest.mark.parametrize("name", [*HOSTILE, "absolute"])
def test_a_manifest_of_names_that_lead_out_is_refused_before_anything_is_touched(
    name, place, outside
):
    name = str(outside) if name == "absolute" else name
    manifest = place / dumps.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: 8}))
    before = tree(place)
    for use in (lambda: said(place), lambda: dump(place, "new")):
        with pytest.raises(RuntimeError, match="must name files inside of the folder"):
            use()
        changed = {file for file in tree(place).items() ^ before.items() if file[0] != str(place)}
        assert not changed
    assert outside.read_text() == "not ours"


@pytest.mark.parametrize("name", HOSTILE)
def test_the_same_goes_for_a_dump_that_is_half_moved(name, place, outside):
    complete = place / dumps._COMPLETE
    complete.mkdir()
    put(complete, "new")
    (complete / "link").symlink_to(outside.parent)
    (complete / dumps.MANIFEST).write_text(json.dumps({"writer/metadata.json": 5, name: 5}))
    for use in (lambda: said(place), lambda: dump(place, "newer")):
        with pytest.raises(RuntimeError, match="must name files inside of the folder"):
            use()
    assert outside.read_text() == "not ours"
    assert {json.loads((place / part).read_text()) for part in PARTS} == {"old"}


@pytest.mark.parametrize("text", ["?", "[]", "null", '{"storage/records": "5"}'])
def test_a_garbled_manifest_is_refused(text, place):
    dump(place, "old")
    (place / dumps.MANIFEST).write_text(text)
    with pytest.raises(RuntimeError, match=r"not whole: generations_manifest\.json"):
        said(place)


def test_a_dump_that_has_no_room_is_refused_and_the_earlier_one_stays(place):
    dump(place, "old")
    (place / "transform.t").mkdir()
    (place / "transform.t" / "notes").write_text("not ours")
    with pytest.raises(RuntimeError, match=r"can't put transform\.t into .* in the way"):
        dump(place, "new", **{"transform.t": 0})
    assert said(place) == {"old"}
    assert (place / "transform.t" / "notes").read_text() == "not ours"


def test_files_that_are_not_the_dumps_own_stay_and_are_not_read(place):
    place.mkdir()
    (place / "transform.t").write_text("?")  # of an earlier dump by TorchRL
    (place / "notes.json").write_text("?")
    dump(place, "new")
    with dumps.opened(place) as folder:
        assert listing(folder) == sorted(PARTS)
    assert (place / "notes.json").read_text() == "?"


def test_a_dump_without_a_manifest_is_torchrls_and_is_read_where_it_is(place):
    put(place, "theirs")
    (place / "notes").mkdir()
    with dumps.opened(place) as folder:
        assert folder == place


@pytest.mark.parametrize("there", [False, True])
def test_where_there_is_no_dump_none_is_opened(there, place):
    if there:
        place.mkdir()
    with pytest.raises(FileNotFoundError, match="no whole dump"):
        said(place)
    assert place.exists() == there


def test_a_dump_is_read_where_nothing_can_be_written(place):
    dump(place, "old")
    folders = [place, *(file for file in place.rglob("*") if file.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = tree(place)
    assert said(place) == {"old"}
    assert tree(place) == before
    for folder in folders:
        folder.chmod(0o755)


def test_without_fcntl_a_dump_takes_no_lock_and_can_be_loaded(place, monkeypatch):
    monkeypatch.setattr(dumps, "fcntl", None)
    rb, other = td_buffer(), td_buffer()
    rb.dumps(place)
    other.loads(place)
    assert other[:]["id"].tolist() == rb[:]["id"].tolist()


def test_no_folder_is_left_behind_by_a_load(place, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    Path(tmp_path / "temporary").mkdir()
    dump(place, "old")
    assert said(place) == {"old"}
    assert listing(tmp_path / "temporary") == []
    assert not list((tmp_path / "temporary").iterdir())
