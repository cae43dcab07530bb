"""Rents tagged machines, prints their instance ids: `python rent_tagged.py '[[REGION, {TAG: VALUE}], …]'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3

from tests.cloud import bare


def main(wanted: str) -> None:
    for region, tags in json.loads(wanted):
        boto3.setup_default_session(region_name=region)
        instance, _ = bare.rent(Path.cwd())
        ec2: Any = boto3.client("ec2")
        tagged = [{"Key": key, "Value": value} for key, value in tags.items()]
        ec2.create_tags(Resources=[instance], Tags=tagged)
        print(instance)


if __name__ == "__main__":
    main(sys.argv[1])
