"""Which faults a run is started again after, by attempts written down as `launch/job.py` does."""

import pytest

from clap_ds.launch.attempt import Ending
from clap_ds.launch.recovery import MOST_FREE, PORT_TAKEN, Attempts, cause_of

HOSTS = ["n1", "n2", "n10"]


def _failed(message: str, *hosts: str, lost: bool = False) -> Ending:
    return Ending("failed", message, 1, list(hosts), lost)


def _attempts(*endings: Ending) -> Attempts:
    attempts = Attempts(0, [])
    for ending in endings:
        attempts.note(ending, HOSTS, HOSTS, "2026-11-22T08:00:00")
    return attempts


def test_cause_leaves_out_what_differs_from_host_to_host() -> None:
    one = cause_of("n1: its ranks ended with code 1: CUDA error 0x7f01 after 3.5 s; all stacks are in /a/b", HOSTS)
    two = cause_of("n10: its ranks ended with code 1: CUDA error 0x7fff after 12 s", HOSTS)
    assert one == two == "HOST: its ranks ended with code N: CUDA error N after N s"
    assert cause_of("n1: CUDA error", HOSTS) != cause_of("n1: NCCL error", HOSTS)
    assert cause_of("/data/n1.tar", ["n"]) == "/data/nN.tar", "a host's name within another word stays"


@pytest.mark.parametrize(
    ("ending", "goes_on"),
    [
        (_failed("lost n1: no sign of life for 61 s", "n1", lost=True), True),
        (_failed("n1: its ranks ended with code 1: NCCL error", "n1"), True),
        (_failed("KeyError: 'loss'"), False),  # the program's
        (_failed(f"port 17000 {PORT_TAKEN}"), True),
        (Ending("out_of_memory", "CUDA out of memory", 1, ["n1"]), False),
        (Ending("completed", "", 0), False),
        (Ending("timeout", "stopped by SIGUSR1", 0), False),
    ],
)
def test_what_is_worth_another_attempt(ending: Ending, goes_on: bool) -> None:
    assert _attempts(ending).may_go_on() == goes_on
    # SLURM may start it anew only for a host's fault.
    assert _attempts(ending).may_be_requeued() == (goes_on and bool(ending.hosts))


def test_free_attempts_are_few() -> None:
    ending = _failed(f"port 17000 {PORT_TAKEN}")
    assert _attempts(*[ending] * MOST_FREE).may_go_on()
    too_many = _attempts(*[ending] * (MOST_FREE + 1))
    assert not too_many.may_go_on()
    # Another start of the job has its own.
    too_many.start = 1
    too_many.note(ending, HOSTS, HOSTS, "2026-11-22T09:00:00")
    assert too_many.may_go_on()
    assert len(too_many.of_this_start()) == 1


def test_the_same_error_on_other_hosts_is_the_programs() -> None:
    error = "{}: its ranks ended with code 1: CUDA error: device-side assert"
    one, two = (_failed(error.format(name), name) for name in ("n1", "n2"))
    assert _attempts(one, two).hosts_of_same_error() == ["n1", "n2"]
    assert not _attempts(one, two).may_go_on()
    assert not _attempts(one, two).may_be_requeued()
    assert _attempts(one, one).hosts_of_same_error() == [], "one host, twice: it is the host"
    assert _attempts(one, _failed("n2: NCCL error", "n2")).hosts_of_same_error() == []
    lost = [_failed(f"lost {name}: no sign of life for 60 s", name, lost=True) for name in ("n1", "n2")]
    assert _attempts(*lost).hosts_of_same_error() == [], "a program doesn't make hosts fall silent"
    assert _attempts(*lost).may_go_on()


def test_requeues_are_counted_over_all_starts() -> None:
    attempts = _attempts(_failed("lost n1", "n1", lost=True))
    assert attempts.requeues() == 0
    attempts.all[-1]["requeued"] = True
    again = Attempts(1, attempts.all)
    again.note(_failed("lost n2", "n2", lost=True), HOSTS, HOSTS, "2026-11-22T09:00:00")
    assert again.requeues() == 1
    assert again.may_be_requeued()
    assert again.excluded() == ["n1", "n2"]
