"""A real SLURM cluster on one machine: a controller and nodes, each a set of Linux namespaces with
its own network.

A host is an `unshare`d process that sleeps as pid 1 of its own pid namespace; killing it ends all
its processes. A bridge in the controller's network namespace connects the nodes. It has no uplink,
so the machine's own interfaces, /etc, /run and ports are not touched. Needs root and the programs
in `tests.needs.CLUSTER`.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_SUBNET = "10.99.0"
_PREFIX = "clap-slurm-"
GPUS = 4
CPUS = 8
CGROUPS = Path("/sys/fs/cgroup/freezer")
"""If it exists, SLURM tracks a step's processes with the cgroup-v1 freezer, as on most clusters."""
TERMINAL_STATES = {
    "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
}  # fmt: skip
"""States of jobs that have ended. There are many others, some of them brief (`SIGNALING`)."""


class SlurmCluster:
    """Hosts `node1` … `nodeN` and `ctl`, started on construction. Unique paths keep clusters and
    leftovers apart."""

    def __init__(self, num_nodes: int) -> None:
        # One cluster per machine: SLURM's cgroups are named after nodes only.
        temporary = Path(tempfile.gettempdir())
        self._lock = (temporary / "clap-slurm.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        # Left by a killed test run, whose hosts are gone.
        for folder in temporary.glob(f"{_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._remove_cgroups()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.folder.chmod(0o755)
        self._addresses = {"ctl": f"{_SUBNET}.254"} | {
            host: f"{_SUBNET}.{i}" for i, host in enumerate(self.nodes, 1)
        }
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._init: dict[str, int] = {}
        try:
            self._write_files()
            for host in self._addresses:
                self._start_host(host)
            self._start_controller()
            for host in self.nodes:
                self.run(host, "/usr/sbin/sshd", "-f", str(self.folder / "sshd_config"))
                self.run(host, "slurmd", "-N", host)
            self.wait_until(self._all_idle, 120, "nodes to become idle")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all hosts and remove the folder; safe to call twice."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        inits = [Path(f"/proc/{pid}") for pid in self._init.values()]
        with contextlib.suppress(AssertionError):
            self.wait_until(lambda: not any(map(Path.exists, inits)), 5, "hosts")
        self._remove_cgroups()
        self._holders = {}
        self._init = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _remove_cgroups(self) -> None:
        for host in self.nodes:
            for folder, _, _ in os.walk(CGROUPS / f"slurm_{host}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    # --- use

    def run(
        self,
        host: str,
        *arguments: str,
        check: bool = True,
        folder: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        enter = f"nsenter -t {self._init[host]} -n -u -m -p".split()
        enter += [f"--wd={folder or self.folder}", "--"]
        command = [*enter, "env", f"SLURM_CONF={self.folder}/slurm.conf", *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        if check and result.returncode:
            raise AssertionError(
                f"{host}: {' '.join(arguments)}: {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        text = self.run("ctl", "scontrol", "show", "job", "-o", number).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def processes(self, pattern: str) -> dict[str, list[str]]:
        """Return matching command lines by node, without nodes that have none."""
        by_host = {}
        for host in self._addresses:
            lines = self.run(host, "ps", "-eo", "pid,args", "--no-headers").stdout
            matching = re.findall(f"^.*(?:{pattern}).*$", lines, re.MULTILINE)
            if matching:
                by_host[host] = matching
        return by_host

    def left_behind(self, pattern: str) -> dict[str, list[str]]:
        """Return the `processes` that remain after a grace period for exiting ones."""
        with contextlib.suppress(AssertionError):
            self.wait_until(lambda: not self.processes(pattern), 5, "processes to end")
        return self.processes(pattern)

    @contextlib.contextmanager
    def mounted(self, host: str, *arguments: str) -> Iterator[None]:
        """Let a host see other content at a path, the last of `mount`'s arguments."""
        self.run(host, "mount", *arguments)
        try:
            yield
        finally:
            self.run(host, "umount", "--lazy", arguments[-1])

    def disconnect(self, host: str) -> None:
        """Cut a node off the network."""
        self.run("ctl", "ip", "link", "set", f"v-{host}", "down")

    def connect(self, host: str) -> None:
        """Reconnect a node and resume it in SLURM, which ignores what is left there of jobs that
        ended seconds ago."""
        self.run(host, "pkill", "-KILL", "-f", "slurmstepd|clap_ds/", check=False)
        self.run("ctl", "ip", "link", "set", f"v-{host}", "up")
        for state in ("State=DOWN", "State=RESUME"):
            self.run(
                "ctl", "scontrol", "update", f"NodeName={host}", state, "Reason=cut", check=False
            )

    @contextlib.contextmanager
    def slow_network(self, rate: str) -> Iterator[None]:
        """Limit each node's links, also to itself, to `rate`, in `tc`'s units."""
        limit = f"root tbf rate {rate} burst 128kb latency 1s"
        try:
            for host in self.nodes:
                for device in ("eth0", "lo"):
                    self.run(host, *f"tc qdisc add dev {device} {limit}".split())
            yield
        finally:
            for host in self.nodes:
                for device in ("eth0", "lo"):
                    self.run(host, *f"tc qdisc del dev {device} root".split(), check=False)

    @staticmethod
    def wait_until(condition: Callable[[], Any], timeout_s: float, event: str) -> None:
        """Wait until a condition holds; AssertionError after the time limit."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f"waited {timeout_s:.0f} s for {event}"
            time.sleep(0.2)

    def wait_until_idle(self) -> None:
        self.wait_until(self._all_idle, 60, "nodes to become idle")

    def _all_idle(self) -> bool:
        states = self.run(
            "ctl", "sinfo", "-h", "-N", "-p", "gpu", "-o", "%T", check=False
        ).stdout.split()
        return states == ["idle"] * len(self.nodes)

    # --- start

    def _write_files(self) -> None:
        for name in ("log", "state", "dev", "ssh", *(f"spool/{host}" for host in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self._make_keys()
        for number in range(GPUS):
            # SLURM counts and assigns this null-like character device as a GPU.
            path = self.folder / "dev" / f"gpu{number}"
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{address} {host}" for host, address in self._addresses.items()]
        gpus = f"Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}]"
        self._write("hosts", hosts)
        self._write("slurm.conf", self._slurm_conf().split(";"))
        self._write("gres.conf", [f"NodeName={','.join(self.nodes)} {gpus}"])
        plugin = ["CgroupPlugin=cgroup/v1"] if CGROUPS.is_dir() else []
        self._write("cgroup.conf", ["CgroupAutomount=no", *plugin])
        self._write(
            "sshd_config",
            [
                f"HostKey {self.folder}/ssh/host",
                f"AuthorizedKeysFile {self.folder}/ssh/authorized_keys",
                "StrictModes no",
                "UsePAM no",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "UseDNS no",
                "MaxStartups 100",
            ],
        )
        self._write(
            "ssh_config",
            [
                "Host *",
                f"IdentityFile {self.folder}/ssh/user",
                "StrictHostKeyChecking no",
                "UserKnownHostsFile /dev/null",
                "LogLevel ERROR",
            ],
        )

    def _write(self, name: str, lines: list[str]) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def _make_keys(self) -> None:
        """Make the keys of munge and ssh. Others must not read them."""
        munge_key = self.folder / "munge.key"
        munge_key.write_bytes(os.urandom(128))
        munge_key.chmod(0o600)
        ssh = self.folder / "ssh"
        ssh.chmod(0o700)
        for name in ("user", "host"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name)]
            subprocess.run(keygen, check=True)
        shutil.copy(ssh / "user.pub", ssh / "authorized_keys")

    def _slurm_conf(self) -> str:
        folder = self.folder
        hosts = ((host, self._addresses[host]) for host in self.nodes)
        settings = f"""
            ClusterName=test SlurmctldHost=ctl({self._addresses["ctl"]}) SlurmUser=root SlurmdUser=root
            AuthType=auth/munge AuthInfo=socket={folder}/munge.sock,cred_expire=5
            ProctrackType=proctrack/{"cgroup" if CGROUPS.is_dir() else "linuxproc"}
            TaskPlugin=task/none SwitchType=switch/none MpiDefault=none
            JobAcctGatherType=jobacct_gather/none AccountingStorageType=accounting_storage/none
            ReturnToService=2 SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/slurmd-%n.pid
            SlurmdSpoolDir={folder}/spool/%n StateSaveLocation={folder}/state
            SlurmctldLogFile={folder}/log/slurmctld.log SlurmdLogFile={folder}/log/slurmd-%n.log
            SlurmctldTimeout=60 SlurmdTimeout=30 InactiveLimit=0 KillWait=15 MinJobAge=3600
            SchedulerType=sched/backfill SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
            SelectType=select/cons_tres SelectTypeParameters=CR_Core PropagateResourceLimits=NONE
            JobRequeue=1 GresTypes=gpu SlurmdParameters=config_overrides"""
        nodes = [f"NodeName=DEFAULT CPUs={CPUS} RealMemory=16000 Gres=gpu:{GPUS} State=UNKNOWN"]
        nodes += [f"NodeName={host} NodeAddr={address}" for host, address in hosts]
        partition = (
            "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"
        )
        return ";".join([*settings.split(), *nodes, partition])

    def _start_host(self, host: str) -> None:
        """Start a host: namespaces with a name, private run-time folders, and a link to the
        controller's bridge."""
        ready = self.folder / f"ready-{host}"
        script = (
            'set -e; hostname "$1"; mount -t proc proc /proc; mount -t tmpfs tmpfs /run; mkdir -p /run/sshd /run/lock;'
            'mount -t tmpfs tmpfs /dev/shm; chmod 1777 /dev/shm; mount --bind "$2/hosts" /etc/hosts;'
            'touch /etc/ssh/ssh_config; mount --bind "$2/ssh_config" /etc/ssh/ssh_config; ip link set lo up; touch "$3";'
            "while :; do sleep 3600 & wait $!; done"
        )
        with (self.folder / "log" / f"host-{host}.log").open("wb") as log:
            self._holders[host] = subprocess.Popen(
                # The host ends with this process.
                ["setpriv", "--pdeathsig", "KILL",
                 "unshare", "-n", "-u", "-m", "-p", "-f", "--kill-child", "--propagation", "private",
                 "bash", "-c", script, f"{_PREFIX}{host}", host, str(self.folder), str(ready)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.wait_until(ready.exists, 60, f"namespaces of {host}")
        holder = self._holders[host].pid
        self._init[host] = int(
            Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0]
        )
        address = self._addresses[host]
        if host == "ctl":
            for words in (
                "link add br0 type bridge",
                f"addr add {address}/24 dev br0",
                "link set br0 up",
            ):
                self.run("ctl", "ip", *words.split())
            return
        pair = f"link add v-{host} netns {self._init['ctl']} type veth peer name eth0 netns {self._init[host]}"
        subprocess.run(["ip", *pair.split()], check=True)
        self.run("ctl", "ip", "link", "set", f"v-{host}", "master", "br0", "up")
        self.run(host, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.run(host, "ip", "link", "set", "eth0", "up")

    def _start_controller(self) -> None:
        folder = self.folder
        self.run(
            "ctl", "munged", "--force", "--num-threads=2", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self.run("ctl", "slurmctld", "-c")
