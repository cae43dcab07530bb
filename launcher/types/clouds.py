"""The clouds that a run can use, and the paths of this user's credentials for them.

Neighbours: `sky_home.py` links them into a run's private home; `prices.py`, `pricing.py` and `doctor.py` ask
which clouds have an account. Reads names, never contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import PreflightError


@dataclass(frozen=True)
class _Account:
    """One cloud's credentials. `places`: their paths below the user's home. `variables`: the beginnings of
    the names of the environment variables that SkyPilot reads. `keys`: those variables that give access; a
    region or a CA bundle is no account.
    """

    places: tuple[str, ...]
    variables: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


_ACCOUNTS: dict[str, _Account] = {
    "aws": _Account(
        (".aws",), ("AWS_",),
        (
            "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
        ),
    ),
    "azure": _Account((".azure",), ("AZURE_",), ("AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE")),
    "cudo": _Account((".config/cudo",)),
    "do": _Account((".config/doctl",)),
    "fluidstack": _Account((".fluidstack",)),
    "gcp": _Account(
        (".config/gcloud",), ("GOOGLE_", "CLOUDSDK_", "GCP_"), ("GOOGLE_APPLICATION_CREDENTIALS",)
    ),
    "ibm": _Account((".ibm",)),
    "kubernetes": _Account((".kube",), ("KUBECONFIG",), ("KUBECONFIG",)),
    "lambda": _Account((".lambda_cloud",)),
    "mithril": _Account((".config/mithril",), ("MITHRIL_",), ("MITHRIL_API_KEY",)),
    "nebius": _Account((".nebius",), ("NEBIUS_",), ("NEBIUS_IAM_TOKEN",)),
    "oci": _Account((".oci",)),
    "paperspace": _Account((".paperspace",)),
    "runpod": _Account((".runpod",), ("RUNPOD_",), ("RUNPOD_API_KEY", "RUNPOD_AI_API_KEY")),
    "scp": _Account((".scp",), ("SCP_",)),
    "seeweb": _Account((".seeweb_cloud",), ("SEEWEB_",), ("SEEWEB_API_KEY",)),
    "shadeform": _Account((".shadeform",), ("SHADEFORM_",), ("SHADEFORM_API_KEY",)),
    "slurm": _Account((".slurm", ".ssh")),
    "ssh": _Account((".sky/ssh_node_pools.yaml", ".kube", ".ssh")),
    "vast": _Account((".config/vastai",), ("VAST_",), ("VAST_API_KEY",)),
    "vsphere": _Account((".vsphere",)),
}  # fmt: skip
# Of a cloud's variables, those of its model services: SkyPilot has no use for them and does not get them.
_OF_MODELS = ("GOOGLE_API_KEY", "GOOGLE_GENAI", "GOOGLE_CSE", "AZURE_API_KEY", "AZURE_OPENAI", "AZURE_AI")
KNOWN_CLOUDS = frozenset(_ACCOUNTS)
ALIASES = {"k8s": "kubernetes", "digitalocean": "do"}
# Clusters of one's own: no price, and one may be on this computer without being meant.
SELF_HOSTED = frozenset({"kubernetes", "slurm", "ssh"})
# SkyPilot cannot have their machines end by themselves (see its AUTODOWN feature).
WITHOUT_AUTODOWN = frozenset({"hyperbolic", "primeintellect", "verda", "yotta"})


def clouds_of(infra: Iterable[str]) -> list[str]:
    """The clouds in `aws/us-east-1`, `k8s`, `ssh/pool`, in their order. Raises PreflightError."""
    found = dict.fromkeys("kubernetes" if one.startswith("k8s") else one.partition("/")[0] for one in infra)
    for cloud in found:
        if cloud not in _ACCOUNTS:
            raise PreflightError(
                f"--infra {cloud}: launch cannot use this cloud",
                f"it can use {', '.join(sorted(_ACCOUNTS))}",
                "launch plan --gpus H100:4 --infra aws",
            )
    return list(found)


def credential_paths(cloud: str) -> tuple[str, ...]:
    """Where its credentials are, below the user's home."""
    return _ACCOUNTS[cloud].places


def is_variable_of(cloud: str, variable: str) -> bool:
    """Whether a variable of the environment is for SkyPilot's work with a cloud."""
    return variable.startswith(_ACCOUNTS[cloud].variables) and not variable.startswith(_OF_MODELS)


def has_account(cloud: str, user_home: Path, environ: Mapping[str, str]) -> bool:
    """Whether the paths or the environment have credentials of a cloud."""
    account = _ACCOUNTS[cloud]
    # The user's own ssh key works everywhere, so it proves no account of a cluster.
    own = [place for place in account.places if cloud not in SELF_HOSTED or place == account.places[0]]
    return any(key in environ for key in account.keys) or any((user_home / place).exists() for place in own)


def no_account(cloud: str) -> PreflightError:
    """The error for a cloud without credentials."""
    return PreflightError(
        f"there are no credentials for {cloud}",
        f"neither {' nor '.join(f'~/{place}' for place in _ACCOUNTS[cloud].places)} exists",
        f"sky check {cloud}  # SkyPilot says how to log in there",
    )
