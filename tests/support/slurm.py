"""A Slurm of one's own on two hosts of this machine (two_hosts.py), with two processors each.

Its daemons have their key, sockets, files and logs in one folder, and listen inside of the hosts alone, so that nothing
of a Slurm of this machine is used or disturbed. They stay in the foreground, and end with the process that has started
them.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from typing import NamedTuple

from support import limits
from support.launch import begin, outside_of_a_job
from support.two_hosts import ADDRESSES, NAMES, two_hosts

INSTALL = "on Debian: apt install slurm-wlm munge libpmix-dev"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol", "sinfo")
KILL_WAIT = 20
"""The seconds from SIGTERM to SIGKILL for a job that is cancelled or over its time. Slurm's own default is 30."""

CONFIGURATION = """\
ClusterName=jaxmpi
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={tmp}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait={kill_wait}
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 DefaultTime=5
"""

NOT_OVER = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")

OF_PMI = "mpi/pmi2: value not properly terminated in client request"
"""What Slurm's PMI-2 says if it gets a line of more than 1,024 bytes. MPICH 5.0.2 may write such lines as it begins, as
they contain memory that nobody has set: of a hundred jobs a few fail."""


class Done(NamedTuple):
    """A job that has ended. A job array has the state and the exit code of the task that has ended worst."""

    number: str
    state: str
    """COMPLETED, FAILED, CANCELLED, TIMEOUT, ..."""
    code: int
    """The exit code of the batch script."""
    output: str


class Slurm:
    """Jobs begin in the folder `work` and have the folder `home`; both hosts see them."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.daemons, self.submitted = hosts, folder, [], {}
        self.work, self.home = folder / "work", folder / "home"
        for name in ("munge", "state", "work", "home", *(f"spool-{name}" for name in NAMES)):
            (folder / name).mkdir()
        machine = "Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000"
        nodes = (f"NodeName={name} NodeAddr={at} {machine}" for name, at in zip(NAMES, ADDRESSES, strict=True))
        values = {"host": NAMES[0], "address": ADDRESSES[0], "folder": folder, "tmp": hosts.tmp}
        text = CONFIGURATION.format(**values, kill_wait=KILL_WAIT, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        if version() >= (23, 2):  # older ones know no such value; nothing here needs control groups
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def environment(self):
        """What a user's shell on the first host has."""
        clean = {name: value for name, value in outside_of_a_job().items() if not name.startswith(("SLURM", "SRUN_"))}
        own = {"SLURM_CONF": self.folder / "slurm.conf", "HOME": self.home, "TMPDIR": self.hosts.tmp}
        return {**clean, "JAX_PLATFORMS": "cpu", **{name: str(value) for name, value in own.items()}}

    def begin(self):
        munge = self.folder / "munge"
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = [f"--{kind}-file={munge / kind}" for kind in ("key", "log", "pid", "seed")]
        # By force, for the folders above may be closed to other users, who have no business here.
        self._daemon("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self._wait("munged", (munge / "socket").exists)
        self._daemon("slurmctld", "-D", on=NAMES[0])
        for name in NAMES:
            self._daemon("slurmd", "-D", on=name)
        self._wait("Slurm", lambda: self.call("sinfo", "-h", "-o", "%t", check=False).stdout.split() == ["idle"])

    def _daemon(self, program, *options, on=NAMES[0]):
        with (self.folder / f"{program}-{on}.output").open("w") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            command = [*self.hosts.enter(on), program, *options]
            self.daemons.append(begin(command, 36000, env=self.environment(), start_new_session=True, **pipes))

    def _wait(self, what, ready, seconds=30):
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or any(process.poll() is not None for process in self.daemons):
                logs = [log for kind in ("*.output", "*.log", "munge/log") for log in self.folder.glob(kind)]
                told = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
                raise RuntimeError(f"{what} does not begin\n{told}")
            time.sleep(0.1)

    def call(self, *words, check=True, timeout=60, **environment):
        """Runs a command of a user on the first host; the finished process with its output."""
        command = [*self.hosts.enter(NAMES[0]), "env", f"--chdir={self.work}", *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        every = {**self.environment(), **environment}
        done = subprocess.run(command, env=every, timeout=limits.within(timeout), check=False, **pipes)
        if check and done.returncode != 0:
            raise AssertionError(f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def submit(self, *words, **environment):
        """By `sbatch` with these options, script and arguments; the number of the job."""
        number = self.call("sbatch", "--parsable", *words, **environment).stdout.strip()
        self.submitted[number] = words, environment
        return number

    def output(self, number):
        """What a job has written so far."""
        files = sorted(self.work.rglob(f"slurm-{number}*.out"))
        return "".join(file.read_text(errors="replace") for file in files)

    def told(self, number, name):
        """What Slurm tells of a job, or of each task of a job array: JobState, Reason, ExitCode, ..."""
        return re.findall(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", "-o", number).stdout)

    def until(self, what, condition, seconds):
        """Waits for a condition, and returns what it is; `what` says of an error for what."""
        end = time.monotonic() + limits.within(seconds)
        while not (found := condition()):
            if time.monotonic() > end:
                raise AssertionError(f"not {what} after {seconds} s")
            time.sleep(0.2)
        return found

    def wait(self, number, seconds=100):
        """Waits for the end of a job, and of its processes some seconds later. A job that has failed as `OF_PMI` says
        is submitted again."""
        done = self._wait_for_one(number, seconds)
        for _ in range(2):
            if OF_PMI in done.output:
                words, environment = self.submitted[done.number]
                done = self._wait_for_one(self.submit(*words, **environment), seconds)
        return done

    def _wait_for_one(self, number, seconds):
        try:
            self.until(f"the end of job {number}", lambda: self._is_over(number), seconds)
            numbers = [f"SLURM_JOB_ID={job}" for job in self.told(number, "JobId")]
            self.until("the end of its processes", lambda: not any(map(limits.processes, numbers)), 10)
        except AssertionError as error:
            self.call("scancel", number, check=False)
            raise AssertionError(f"{error}\n{self.output(number)}") from error
        states = self.told(number, "JobState")
        state = next((state for state in states if state != "COMPLETED"), "COMPLETED")
        code = max(int(code.partition(":")[0]) for code in self.told(number, "ExitCode"))
        return Done(number, state, code, self.output(number))

    def _is_over(self, number):
        return set(self.told(number, "JobState")).isdisjoint(NOT_OVER)

    def end(self):
        """Ends its processes and the jobs, which a daemon that ends leaves alone."""
        for process in reversed(self.daemons):
            process.terminate()
        for process in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        for name in NAMES:
            for process in self.hosts.running(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def version():
    """Slurm's year and month."""
    told = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"(\d+)\.(\d+)", told).groups()))


def missing():
    """What keeps this machine from having it, in words; or nothing."""
    if os.geteuid() != 0:
        return "only root can make its hosts"
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(programs)} ({INSTALL})" if programs else ""


@contextlib.contextmanager
def slurm(folder):
    """The cluster; PermissionError where there can be none."""
    if why := missing():
        raise PermissionError(why)
    (folder / "hosts").mkdir()
    with two_hosts(folder / "hosts") as hosts:
        cluster = Slurm(hosts, folder)
        try:
            cluster.begin()
            yield cluster
        finally:
            cluster.end()
