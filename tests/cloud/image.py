"""The machine image: what SkyPilot would install on a fresh machine, baked once and kept.

SkyPilot reuses an existing `~/skypilot-runtime` and skips its own wheel where the marker has the wheel's
hash; a real stock image downloads uv, a Python and these packages instead, which is not exercised here.
Neighbours: `rig.py` asks for the image and gives a laptop's home the same wheel, `inside/boot.sh` mounts it.
Knows nothing of networks or machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

# Ray 2.9.3, which SkyPilot pins for machines, has no wheels for Python 3.12.
PYTHON = "/usr/bin/python3.11"
# The machine's user. 1000 may be somebody's here.
USER_ID = 21000
_BAKE_SECONDS = 900
# In the wheel build SkyPilot's own code runs: it must be the very wheel it will upload.
_BUILD_WHEEL = "from sky.backends import wheel_utils; print(*wheel_utils.build_sky_wheel())"
_PATCH_RAY = "from sky.skylet.ray_patches import patch; patch()"


def image() -> Path:
    """The folder of the baked image; made now where it is missing (half a minute and a download)."""
    root = Path(platformdirs.user_cache_dir("slipway-tests", appauthor=False)) / "machine-images"
    folder = root / _key()
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{folder.name}.lock"):
        if not folder.is_dir():
            for debris in root.glob(f".{folder.name}.baking-*"):
                shutil.rmtree(debris)
            baking = Path(tempfile.mkdtemp(prefix=f".{folder.name}.baking-", dir=root))
            _bake(baking)
            baking.chmod(0o755)
            baking.rename(folder)
    return folder


def _key() -> str:
    """Everything that decides the content: SkyPilot, the Python, and this recipe."""
    python = subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    sky = importlib.metadata.version("skypilot")
    identity = "\0".join([sky, python, os.uname().machine, Path(__file__).read_text()])
    return f"skypilot-{sky}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _bake(into: Path) -> None:
    import uv

    binary = into / ".local" / "bin" / "uv"
    binary.parent.mkdir(parents=True)
    shutil.copy2(uv.find_uv_bin(), binary)
    wheel, digest = _build_wheel(into)
    runtime = into / "skypilot-runtime"
    _run([str(binary), "venv", "-q", "--relocatable", "--seed", "--python", PYTHON, str(runtime)])
    packages = ["setuptools<70", "click<8.3.0", "ray[default]==2.9.3", "pydantic-core==2.41.1"]
    packages.append(f"skypilot[aws,remote] @ {wheel.as_uri()}")
    python = str(runtime / "bin" / "python")
    _run([str(binary), "pip", "install", "-q", "--compile-bytecode", "--python", python, *packages])
    _run([python, "-c", _PATCH_RAY])
    user_env = str(into / "sky-user-env")
    flags = ["-q", "--seed", "--relocatable", "--system-site-packages"]
    _run([str(binary), "venv", *flags, "--python", PYTHON, user_env])
    (into / "current_sky_wheel_hash").write_text(digest + "\n")
    for path in into.rglob("*"):
        os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def _build_wheel(into: Path) -> tuple[Path, str]:
    """SkyPilot's wheel, kept in `wheels/<hash>/` as it keeps it under ~/.sky; the wheel and its hash."""
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "HOME": home, "TMPDIR": home}
        done = _run([sys.executable, "-c", _BUILD_WHEEL], environ)
        digest = done.split()[-1]
        shutil.copytree(Path(home) / ".sky" / "wheels" / digest, into / "wheels" / digest)
    return next((into / "wheels" / digest).glob("*.whl")), digest


def _run(command: list[str], environ: dict[str, str] | None = None) -> str:
    environ = dict(os.environ) if environ is None else environ
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "copy"}
    environ.pop("VIRTUAL_ENV", None)
    # Not in this repository: its uv settings are for the launcher's environment, and `sky/` would be found.
    done = subprocess.run(
        command, cwd="/", env=environ, capture_output=True, text=True, timeout=_BAKE_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"baking the machine image: {command[:4]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The system frees the lock when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    print(image())
