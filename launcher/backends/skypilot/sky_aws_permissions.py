"""The permissions of an AWS account: its regions, and whether one refuses a run's own request.

Neighbours: `sky_providers.py` lists machines in these regions, `sky_calls.py` answers with these in
SkyPilot's process, `provider_listings.py` asks. Makes no machine: requests are sent with DryRun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.backends.skypilot.sky_prices import machines_with

Json = dict[str, Any]

# AWS's error codes for a refusal by any policy.
DENIED = ("UnauthorizedOperation", "AccessDenied")
# Settings of the user's configuration that choose the network of a machine.
_NETWORK = ("vpc_name", "vpc_names", "subnet_names")
_FIRST = "us-east-1"
_TEMPLATE = "aws-ray.yml.j2"


def account_regions(near: Iterable[str] = ()) -> set[str] | None:
    """The regions this account has: in another one neither it nor its list answers. Asked in one that is
    `near`, else in any: an account may be denied the one that usually answers. None if all refuse."""
    from sky.adaptors import aws

    for region in _all_regions(near):
        with contextlib.suppress(_DeniedError), _denials():
            found: Any = aws.client("ec2", region_name=region).describe_regions()
            return {one["RegionName"] for one in found["Regions"]}
    return None


def _all_regions(near: Iterable[str] = ()) -> list[str]:
    """AWS's regions, the likeliest to answer first."""
    from sky.adaptors import aws

    session: Any = aws.session(profile=aws.get_workspace_profile())
    own = [session.region_name] if session.region_name else []
    return list(dict.fromkeys([*near, *own, _FIRST, *session.get_available_regions("ec2")]))


def _lists_somewhere() -> bool:
    """Whether any region lists its machines to this account now. If none does, the refusal may be for this
    computer's address or an ended login, and no region's answer is about the account."""
    from sky.adaptors import aws

    errors: Any = aws.botocore_exceptions()
    for region in _all_regions():
        with contextlib.suppress(errors.ClientError):
            client: Any = aws.client("ec2", region_name=region)
            client.describe_instances(MaxResults=5)
            return True
    return False


def _has_own_network(region: str) -> bool:
    """Whether the user's configuration names the network there: a policy may allow machines in that network
    alone, and a request with DryRun names none."""
    from sky import skypilot_config

    return any(
        skypilot_config.get_effective_region_config(
            cloud="aws", region=region, keys=(name,), default_value=None
        )
        for name in _NETWORK
    )


def rent_refused(cluster: str, region: str, gpus: str, disk_gb: int | None, labels: dict[str, str]) -> Json:
    """Whether the account may not have this run's machine in a region; "refused" is then AWS's error.

    It is None if that is not certain, also if no region answers from here. The request is the run's own in
    full, because a policy may refuse any other type, image or tag, and allow these. A machine is impossible
    only if every form of the request is refused.
    """
    from sky.adaptors import aws

    if _has_own_network(region):
        return {"refused": None}
    client: Any = aws.client("ec2", region_name=region)
    word: str | None = None
    for request in _requests(cluster, region, gpus, disk_gb, labels):
        try:
            with _denials():
                _dry_run(client, request)
        except _DeniedError as denied:
            word = str(denied)
        else:
            return {"refused": None}
    return {"refused": word if word is not None and _lists_somewhere() else None}


def is_denial(error: Exception) -> bool:
    """Whether a policy refused a call of AWS's, rather than the network or old credentials."""
    return code(error) in DENIED


def code(error: Exception) -> str | None:
    """AWS's code of an error; None for one that is not AWS's answer."""
    answer: Any = getattr(error, "response", None)
    return answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None


class _DeniedError(Exception):
    """A policy of the account refuses the call."""


@contextlib.contextmanager
def _denials() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_denial(error):
            raise _DeniedError(str(error)) from error
        raise


def _dry_run(client: Any, request: Json) -> None:
    """Send the request with DryRun. Raises AWS's error, unless the answer is yes."""
    from sky.adaptors import aws

    errors: Any = aws.botocore_exceptions()
    try:
        client.run_instances(DryRun=True, **request)
    except errors.ClientError as error:
        if is_denial(error):
            raise
        aws_error = error.response["Error"]
        if "IamInstanceProfile" in request and "iam" in aws_error["Message"].lower():
            # SkyPilot could not make that profile; the rest of the request tells whether more is refused.
            _dry_run(client, {name: value for name, value in request.items() if name != "IamInstanceProfile"})


def _requests(
    cluster: str, region: str, gpus: str, disk_gb: int | None, labels: dict[str, str]
) -> Iterator[Json]:
    """The requests that SkyPilot would send to the region: one for each type with these GPUs, with its
    volumes' tags and, as SkyPilot does if those are refused, one without."""
    gpu, _, count = gpus.partition(":")
    offers = machines_with("aws", gpu, int(count or 1))
    for kind in sorted({one.instance_type for one in offers if one.region == region}):
        request = _request(cluster, region, kind, gpus, disk_gb, labels)
        yield request
        tags = [one for one in request["TagSpecifications"] if one["ResourceType"] != "volume"]
        yield request | {"TagSpecifications": tags}


def _request(
    cluster: str, region: str, kind: str, gpus: str, disk_gb: int | None, labels: dict[str, str]
) -> Json:
    """SkyPilot's own template, filled in by it; without the network, which it looks up in the region."""
    import yaml
    from sky.backends import backend_utils
    from sky.provision.aws.config import DEFAULT_SKYPILOT_INSTANCE_PROFILE
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME, TAG_SKYPILOT_CLUSTER_NAME

    import sky
    from sky import clouds

    wanted: Any = sky.Resources(
        infra=f"aws/{region}", instance_type=kind, accelerators=gpus, disk_size=disk_gb, labels=labels
    )
    with _without_looking_at_the_image():
        written = backend_utils.write_cluster_config(
            wanted, 1, _TEMPLATE, cluster, Path("none"), "none", clouds.Region(region),
            [clouds.Zone(f"{region}a")], dryrun=True, keep_launch_fields_in_existing_config=False,
        )  # fmt: skip
    config = yaml.safe_load(Path(written["ray"]).read_text())
    node: Json = config["available_node_types"]["ray.head.default"]["node_config"]
    name = config["cluster_name"]
    tags = [{"Key": key, "Value": name} for key in ("Name", TAG_RAY_CLUSTER_NAME, TAG_SKYPILOT_CLUSTER_NAME)]
    specs = [one | {"Tags": [*tags, *one["Tags"]]} for one in node["TagSpecifications"]]
    node.setdefault("IamInstanceProfile", {"Name": DEFAULT_SKYPILOT_INSTANCE_PROFILE})
    return node | {"TagSpecifications": specs, "MinCount": 1, "MaxCount": 1}


@contextlib.contextmanager
def _without_looking_at_the_image() -> Iterator[None]:
    """Use the default name of the image's first disk. SkyPilot asks the region for it, and a refusal of that
    question proves nothing."""
    from sky.clouds import aws

    kind: Any = aws.AWS
    own = kind.__dict__["get_image_root_device_name"]
    kind.get_image_root_device_name = classmethod(lambda *_: aws.DEFAULT_ROOT_DEVICE_NAME)
    try:
        yield
    finally:
        kind.get_image_root_device_name = own
