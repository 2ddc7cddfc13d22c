"""The place of a rank, as its environment tells it; and processes that end with the one that started them."""

import signal
import subprocess
import sys

import psutil
import pytest

from finefit.artifacts.launcher import (
    Place,
    allocator_setting,
    chosen_variables,
    find_place,
    recorded_variables,
    without_place,
)
from finefit.errors import RunError

PLACE = Place(rank=3, size=4, local_rank=1, local_size=2, address="node-0", port=29500)


def test_a_place_is_found_where_it_was_told() -> None:
    assert find_place({"HOME": "/"} | PLACE.variables()) == PLACE
    assert PLACE.num_nodes == 2


def test_who_has_no_rank_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"LOCAL_RANK": "0", "MASTER_PORT": "1"}) is None


def test_half_an_environment_is_refused_with_what_is_missing() -> None:
    with pytest.raises(
        RunError,
        match="RANK=0 is set in the environment, but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    ):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "3"}])
def test_numbers_that_contradict_each_other_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(RunError, match="contradict each other"):
        find_place(PLACE.variables() | changes)


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(RunError, match="MASTER_PORT=tcp:1 in the environment is no number"):
        find_place(PLACE.variables() | {"MASTER_PORT": "tcp:1"})


def test_a_child_that_is_no_rank_hears_nothing_of_places() -> None:
    environment = PLACE.variables() | {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "HOME": "/"}
    assert without_place(environment) == {"HOME": "/"}


def test_the_ranks_of_a_node_divide_its_threads() -> None:
    assert (PLACE.share(8), PLACE.share(3), PLACE.share(1)) == (4, 1, 1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_own_setting_of_the_allocator_is_kept_and_recorded_under_either_name(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    assert allocator_setting(environment) == "max_split_size_mb:128"
    assert not any("ALLOC_CONF" in chosen for chosen in chosen_variables(environment, deterministic=False))
    assert recorded_variables(environment) == environment


def test_where_the_user_says_nothing_segments_grow() -> None:
    assert allocator_setting({}) is None
    assert chosen_variables({}, deterministic=False)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_of_two_names_the_one_that_torch_reads_first_counts() -> None:
    assert allocator_setting({"PYTORCH_ALLOC_CONF": "new", "PYTORCH_CUDA_ALLOC_CONF": "old"}) == "old"


def test_what_decides_how_ranks_meet_is_recorded_and_nothing_private() -> None:
    environment = (
        PLACE.variables()
        | chosen_variables({}, deterministic=True)
        | {"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "1,2"}
    )
    recorded = recorded_variables(environment)
    assert recorded["MASTER_PORT"] == "29500"
    assert recorded["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert recorded["NCCL_P2P_DISABLE"] == "1"
    assert recorded["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "HF_TOKEN" not in recorded


CHILD = """
import sys
sys.platform = sys.argv[2]
from finefit.artifacts.launcher import end_with_parent
end_with_parent(int(sys.argv[1]))
print("begun", flush=True)
while True:
    pass
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline(), flush=True)
input()
"""


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])  # where the kernel does it, and where it does not
def test_a_process_in_an_endless_loop_ends_with_the_one_that_started_it(platform: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, platform], stdin=pipe, stdout=pipe, text=True
    ) as parent:
        assert parent.stdout is not None
        number, begun = parent.stdout.readline().split()
        child = psutil.Process(int(number))
        parent.kill()
    try:
        assert "begun" in begun
        child.wait(30)
    finally:
        if child.is_running():
            child.kill()


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_process_whose_parent_has_ended_already_does_not_begin(platform: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(gone.pid), platform], capture_output=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout) == (-signal.SIGKILL, b"")
