"""What of ssh and of a remote folder is on this computer: options as ssh reads them, archives unpacked."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from launcher.machines.link import Host
from launcher.machines.remote import _unpack


def test_ssh_reads_paths_with_spaces_and_percent_signs_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a home %d"
    host = Host("192.0.2.1", "ubuntu", folder / "key", folder / "known hosts")
    said = subprocess.run(
        ["ssh", "-G", *host.options(), host.address], capture_output=True, text=True, check=True
    )
    read = dict(line.split(" ", 1) for line in said.stdout.splitlines())
    assert read["identityfile"].replace("%%", "%") == str(folder / "key")
    assert read["userknownhostsfile"].strip('"').replace("%%", "%") == str(folder / "known hosts")


def test_an_archive_of_a_machine_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("./supervisor.json", "./logs/keeper.log", "../outside", "/absolute"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"{}"))
        link = tarfile.TarInfo("./lease")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    here = tmp_path / "here"
    here.mkdir()
    _unpack(packed.getvalue(), here)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()} == {
        "here/supervisor.json", "here/logs/keeper.log",
    }  # fmt: skip
