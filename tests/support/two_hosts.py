"""Two hosts on this machine: network namespaces with a hostname, temporary files and shared memory of their own.

A remote agent enters them as ssh would: with an empty environment, in the home folder. It needs root, `ip` of iproute2,
`unshare` and `nsenter`.
"""

import contextlib
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

NAMES = ("one", "two")
ADDRESSES = ("10.197.3.1", "10.197.3.2")

AGENT = """\
#!/bin/sh
# agent [options] host command...
while [ "${1#-}" != "$1" ]; do shift; done
process=$(cat FOLDER/$1.process); shift
cd /
exec nsenter --target "$process" --net --uts --mount \\
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root sh -c "cd; $*"
"""


class Hosts:
    """`folder` is where both find their files; the folder `tmp` in it is each one's own."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.agent, self.file, self.tmp = folder / "agent", folder / "hosts", folder / "tmp"
        self.tmp.mkdir()
        self.agent.write_text(AGENT.replace("FOLDER", str(folder)))
        self.agent.chmod(0o755)
        (folder / "etc-hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in zip(NAMES, ADDRESSES, strict=True))
        )

    def begin(self):
        for name in NAMES:
            self._begin(name)
        one, two = (process.pid for process in self.processes)
        self._ip("link", "add", "veth-jm1", "netns", one, "type", "veth", "peer", "name", "veth-jm2", "netns", two)
        for name, address, link in zip(NAMES, ADDRESSES, ("veth-jm1", "veth-jm2"), strict=True):
            for words in (f"addr add {address}/24 dev {link}", f"link set {link} up", "link set lo up"):
                subprocess.run([*self.enter(name), "ip", *words.split()], check=True, capture_output=True)

    def _begin(self, name):
        """A process that keeps a host's namespaces; they end with it."""
        prepare = f"""
            hostname {name}
            mount --bind {self.folder}/etc-hosts /etc/hosts
            mount -t tmpfs none {self.tmp}
            mount -t tmpfs none /dev/shm
            echo ready
            exec sleep 100000
        """
        apart = ["unshare", "--net", "--uts", "--mount", "--propagation", "private"]
        command = [*apart, "sh", "-ec", textwrap.dedent(prepare)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        if process.stdout.readline() != "ready\n":
            raise PermissionError(process.stderr.read())
        (self.folder / f"{name}.process").write_text(str(process.pid))

    def _ip(self, *words):
        subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)

    def enter(self, name):
        """The words before a command that run it on a host."""
        process = (self.folder / f"{name}.process").read_text()
        return ["nsenter", "--target", process, "--net", "--uts", "--mount", f"--wd={os.getcwd()}"]

    def running(self, name):
        """The processes of a host, but that which keeps it."""
        keeper = (self.folder / f"{name}.process").read_text()
        namespace = os.readlink(f"/proc/{keeper}/ns/uts")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "uts") == namespace and process.name != keeper:
                    yield int(process.name)

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def two_hosts(folder):
    """The hosts; PermissionError where they are not permitted."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        raise PermissionError(f"no {', '.join(missing)}" if missing else "only root may make namespaces")
    hosts = Hosts(folder)
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()
