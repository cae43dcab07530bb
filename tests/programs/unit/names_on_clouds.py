"""Each cloud's own form of a cluster's name, as SkyPilot makes it: ids and clouds in, names by cloud out."""

from __future__ import annotations

import json
import sys

from sky.utils import common_utils
from sky.utils.registry import CLOUD_REGISTRY


def names(cloud: str, ids: list[str]) -> list[str]:
    known = CLOUD_REGISTRY.from_str(cloud)
    assert known is not None
    longest = known.max_cluster_name_length()
    return [common_utils.make_cluster_name_on_cloud(one, max_length=longest) for one in ids]


if __name__ == "__main__":
    ids, wanted = json.load(sys.stdin)
    json.dump({cloud: names(cloud, ids) for cloud in wanted}, sys.stdout)
