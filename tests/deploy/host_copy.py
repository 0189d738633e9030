"""Copy of this host in a mount namespace: changes vanish with the namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Everything that is written lies in memory; /proc is that of the host, /run is empty as at boot.
_COPY = """
set -e
mount -t tmpfs layers {at}
mkdir {at}/upper {at}/work {at}/root
mount -t overlay copy -o lowerdir=/,upperdir={at}/upper,workdir={at}/work {at}/root
mount -t proc proc {at}/root/proc
mount -t tmpfs run {at}/root/run
mount -t tmpfs tmp {at}/root/tmp
mount --rbind /dev {at}/root/dev
cp {package} {at}/root/tmp/rankdump.deb
cp {pages} {at}/root/tmp/rankdump-web.deb
echo ready
exec sleep infinity
"""


def copied(at: Path, package: Path, pages: Path) -> subprocess.Popen[str]:
    """Return a process that holds a copy with the package, and that of pages, in its /tmp."""
    script = _COPY.format(at=at, package=package, pages=pages)
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


class HostCopy:
    """The copy: commands run in it, by default as root."""

    def __init__(self, holder: subprocess.Popen[str], at: Path) -> None:
        self._enter = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "chroot", str(at / "root")]
        self.path = Path(f"/proc/{holder.pid}/root{at}/root")
        """Its root as this process sees it."""

    def command(self, *words: str, user: str = "") -> list[str]:
        """Return the command that runs words in it."""
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "LC_ALL=C.UTF-8"]
        return [*self._enter, *clean, *as_user, *words]

    def run(self, *words: str, user: str = "") -> str:
        """Return what a command says; it has to succeed."""
        done = subprocess.run(
            self.command(*words, user=user), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr
