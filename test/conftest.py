from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile

import pytest

# A process by "forkserver" gets its arguments as a spawned one does, without 5 seconds of imports.
multiprocessing.set_forkserver_preload(["torchrl.data.replay_buffers.generations"])


@pytest.fixture(autouse=True, scope="session")
def temporary_files_go_with_the_run(tmp_path_factory):
    """TorchRL leaves the folders of ``shared_init`` storages behind: pytest clears this one."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield
    tempfile.tempdir = before[1]
    if before[0] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[0]


@pytest.fixture(params=["state_dict", "dumps"])
def checkpoint(request, tmp_path):
    """Takes a checkpoint of a buffer; returns what loads it into a buffer."""
    count = iter(range(1000))

    def take(rb):
        if request.param == "state_dict":
            state = copy.deepcopy(rb.state_dict())
            return lambda other: other.load_state_dict(state)
        path = tmp_path / str(next(count))
        rb.dumps(path)
        return lambda other: other.loads(path)

    return take
