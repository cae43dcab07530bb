"""What the provider has as the tags of its first machine, as JSON: `python machine_tags.py ENDPOINT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import boto3


def main(endpoint: str) -> None:
    ec2: Any = boto3.client("ec2", endpoint_url=endpoint, region_name="us-east-1")
    tags = ec2.describe_instances()["Reservations"][0]["Instances"][0]["Tags"]
    print(json.dumps({tag["Key"]: tag["Value"] for tag in tags}))


if __name__ == "__main__":
    main(sys.argv[1])
