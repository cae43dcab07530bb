"""plan.py: what is chosen of the offers, in what order, how it is used, and the most it can cost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import CapacityError, ConfigError, LaunchError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.config.setting_sources import load
from launcher.types.offers import Market, Offer, gpus_of
from launcher.types.plan import (
    DEFAULT_RENTED_SECONDS,
    TIMER_SECONDS,
    LocalGpus,
    Plan,
    disk_for,
    make_plan,
    split_gpus,
)
from launcher.types.settings import Settings


def offer(infra: str, price: float, asked: str = "aws", kind: str = "p5.24xlarge") -> Offer:
    return Offer(asked, infra, kind, "H100", 4, price)


EAST, WEST = offer("aws/us-east-1", 27.52), offer("aws/us-west-2", 29.10)
LAMBDA = offer("lambda/us-east-3", 11.96, "lambda", "gpu_4x_h100")
TYPES = {"H100": [4, 8], "A100": [8], "L4": [1]}


def market(*offers: Offer, **fields: Any) -> Market:
    return Market(offers=offers, **{"types": TYPES, **fields})


@pytest.fixture
def wish(tmp_path: Path):
    """Settings as typed: wish(gpus="H100:4", max="1h")."""

    def wish(**flags: str) -> Settings:
        home = Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache")
        return load({"gpus": "H100:4", **flags}, environ={}, folder=tmp_path, home=home)

    return wish


def rented(plan: Plan) -> Any:
    assert plan.rented is not None
    return plan.rented


# ------------------------------------------------------------------ what is chosen


def test_the_cheapest_is_tried_first_and_the_dearest_decides_what_it_may_cost(wish) -> None:
    plan = make_plan(wish(infra="aws,lambda", max="2h"), market(WEST, LAMBDA, EAST))
    assert plan.where == "4×H100 on lambda/us-east-3"
    assert [one.infra for one in plan.candidates] == ["lambda/us-east-3", "aws/us-east-1", "aws/us-west-2"]
    assert plan.price_per_hour == 11.96 and plan.max_price_per_hour == 29.10
    assert rented(plan).infra == ("lambda", "aws")
    assert rented(plan).max_price_per_hour == 29.10
    assert rented(plan).gpus == "H100:4"
    hours = (2 * 3600 + 900 + 600 + TIMER_SECONDS) / 3600
    assert plan.max_cost == pytest.approx(29.10 * hours)
    assert plan.describe() == ("4×H100 on lambda/us-east-3, $11.96/h (up to $29.10/h elsewhere), deadline 2h")


def test_what_is_agreed_to_is_one_line(wish) -> None:
    line = make_plan(wish(), market(EAST)).describe_cost()
    assert line == "4×H100 on aws/us-east-1, $27.52/h, deadline 4h: at most $122.24"


def test_places_that_are_too_dear_are_left_out_region_by_region(wish) -> None:
    plan = make_plan(wish(max_price="28"), market(EAST, WEST, LAMBDA))
    assert rented(plan).infra == ("lambda", "aws/us-east-1")
    assert plan.max_price_per_hour == rented(plan).max_price_per_hour == 27.52


def test_g11_above_the_price_cap_nothing_is_planned(wish) -> None:
    with pytest.raises(CapacityError) as refused:
        make_plan(wish(max_price="20"), market(EAST, WEST))
    assert refused.value.exit_code == 4
    assert "$27.52/h or more, on aws/us-east-1" in (refused.value.why or "")
    assert "--max-price 27.52" in (refused.value.hint or "")


def test_a_cluster_of_ones_own_costs_nothing(wish) -> None:
    own = Offer("kubernetes", "kubernetes", None, "H100", 4, 0.0)
    plan = make_plan(wish(), market(own))
    assert plan.max_cost == 0.0
    assert rented(plan).max_price_per_hour is None
    said = "4×H100 on kubernetes, no price: a cluster of your own, deadline 4h"
    assert plan.describe() == plan.describe_cost() == said
    # A budget would bound nothing there.
    assert make_plan(wish(budget="10"), market(own)).deadline_seconds == DEFAULT_RENTED_SECONDS


# ------------------------------------------------------------------ what ends it


def test_without_a_deadline_or_a_budget_it_ends_after_four_hours(wish) -> None:
    assert make_plan(wish(), market(EAST)).deadline_seconds == 4 * 3600
    assert make_plan(wish(max="1h"), market(EAST)).deadline_seconds == 3600
    plan = make_plan(wish(budget="40"), market(EAST))
    assert plan.deadline_seconds is None
    assert plan.max_cost == pytest.approx(40.0 + 27.52 * (600 + TIMER_SECONDS) / 3600)
    assert plan.describe() == "4×H100 on aws/us-east-1, $27.52/h, budget $40.00"
    assert make_plan(wish(budget="40", max="1h"), market(EAST)).max_cost == pytest.approx(39.678, abs=0.01)


@pytest.mark.process
@given(
    price=st.floats(0.01, 500),
    deadline=st.floats(60, 1e6),
    lease=st.floats(15, 86400),
    idle=st.integers(1, 600),
    budget=st.none() | st.floats(0.01, 1e5),
    waits=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_no_run_within_its_limits_costs_more_than_was_agreed_to(
    price: float, deadline: float, lease: float, idle: int, budget: float | None, waits: tuple[float, ...]
) -> None:
    """However much of the deadline, the lease, the idle time and the timer's own it uses up."""
    plan = replace(_any_plan(), price_per_hour=price, deadline_seconds=deadline, lease_seconds=lease)
    assert plan.rented is not None
    plan = replace(plan, budget=budget, rented=replace(plan.rented, idle_minutes=idle), candidates=())
    used = sum(part * most for part, most in zip(waits, (deadline, lease, idle * 60, 90), strict=True))
    spent = price * used / 3600
    if budget is not None:  # reached, and then the machine is left to its timer
        spent = min(spent, budget + price * (waits[2] * idle * 60 + waits[3] * 90) / 3600)
    assert plan.max_cost is not None and spent <= plan.max_cost * (1 + 1e-9)


def _any_plan() -> Plan:
    settings = load({"gpus": "H100:4"}, environ={}, folder=Path("/"), home=Home(*[Path("/nowhere")] * 3))
    return make_plan(settings, market(EAST))


# ------------------------------------------------------------------ how the GPUs are used


@pytest.mark.parametrize(
    ("count", "shares"), [(1, (1, 1)), (2, (1, 1)), (3, (1, 2)), (4, (1, 3)), (8, (2, 6)), (16, (4, 12))]
)
def test_a_quarter_trains_and_a_single_gpu_does_both(count: int, shares: tuple[int, int]) -> None:
    assert split_gpus(count) == shares


def test_one_share_given_the_other_is_the_rest(wish) -> None:
    plan = make_plan(wish(train_gpus="2"), market(EAST))
    assert (rented(plan).train_gpus, rented(plan).infer_gpus) == (2, 2)
    plan = make_plan(wish(infer_gpus="1"), market(EAST))
    assert (rented(plan).train_gpus, rented(plan).infer_gpus) == (3, 1)


@pytest.mark.parametrize(
    ("count", "train", "infer"),
    [(4, 2, 3), (4, 1, 1), (4, 4, None), (4, None, 4), (4, None, 9), (1, 2, None)],
)
def test_shares_that_do_not_add_up_are_refused(count: int, train: int | None, infer: int | None) -> None:
    with pytest.raises(UsageError, match="not a valid split of"):
        split_gpus(count, train, infer)


@given(st.integers(1, 1024))
def test_every_gpu_is_used_by_default(count: int) -> None:
    train, infer = split_gpus(count)
    assert train >= 1 and infer >= 1
    assert train + infer == max(count, 2)


@pytest.mark.parametrize(
    ("model_bytes", "disk"), [(None, None), (10**7, 100), (15 * 10**9, 100), (141 * 10**9, 350)]
)
def test_the_disk_grows_with_the_model(model_bytes: int | None, disk: int | None) -> None:
    assert disk_for(model_bytes) == disk


def test_what_is_said_of_disk_and_idle_time_holds(wish) -> None:
    found = rented(make_plan(wish(disk="300", idle="5m"), market(EAST), 10**12))
    assert (found.disk_gb, found.idle_minutes) == (300, 5)
    found = rented(make_plan(wish(), market(EAST)))
    assert (found.disk_gb, found.idle_minutes) == (None, 10)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("gpus", "found", "error", "what", "hint"),
    [
        ("H10O:4", {}, UsageError, "no GPU is called H10O", "--gpus H100:4 --infra aws"),
        ("RTX4090:1", {}, CapacityError, "no cloud offers RTX4090 on aws", "--gpus A100:1 --infra aws"),
        ("lcal:2", {}, UsageError, "no GPU is called lcal", "launch plan --gpus local:2"),
        ("h100:64", {}, CapacityError, "no machine has 64 H100 on aws", "--gpus H100:8 --infra aws"),
        ("A100:4", {}, CapacityError, "no machine has 4 A100", "--gpus A100:8"),
        ("H100:8", {}, CapacityError, "no cloud offers 8×H100 on aws", "--gpus H100:8 --infra aws"),
        ("L40S:1", {"elsewhere": ("gcp",)}, CapacityError, "no cloud offers L40S", "--infra gcp"),
        ("H100:4", {"types": {}, "without_prices": ("aws",)}, PreflightError, "no prices for aws",
         "launch plan --gpus H100:4 --infra aws --refresh"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_said_with_what_there_is(
    wish, gpus: str, found: dict[str, Any], error: type[LaunchError], what: str, hint: str
) -> None:
    with pytest.raises(error) as refused:
        make_plan(wish(gpus=gpus, infra="aws"), market(**found))
    assert what in refused.value.message
    assert refused.value.why
    assert hint in (refused.value.hint or "")


def test_this_computers_own_gpus_are_shared_out_like_rented_ones_and_cost_nothing(wish) -> None:
    plan = make_plan(wish(gpus="local:4", max="1h"), model_bytes=10**9)
    assert plan.describe() == "tiny on 4 GPUs of this computer, $0.00/h, deadline 1h"
    assert plan.rented is None and plan.max_cost == 0.0 and not plan.unpriced
    assert plan.gpus == plan.own == LocalGpus("local:4", train_gpus=1, infer_gpus=3, model_bytes=10**9)
    two = make_plan(wish(gpus="local:4", train_gpus="2")).own
    assert two is not None and (two.train_gpus, two.infer_gpus, two.is_one_gpu) == (2, 2, False)
    one = make_plan(replace(wish(gpus="local"), runtime={"dtype": "float32"}))
    assert one.where == "1 GPU of this computer" and one.deadline_seconds is None
    assert one.own is not None and one.own.is_one_gpu and one.own.dtype == "float32"
    with pytest.raises(UsageError, match="not a valid split"):
        make_plan(wish(gpus="local:2", infer_gpus="2"))


@pytest.mark.parametrize("option", ["infra=aws", "budget=5", "max_price=3", "disk=100", "copy_rate=2MB/s"])
def test_what_only_a_rented_run_has_is_refused_with_this_computers_gpus(
    wish, option: str, tmp_path: Path
) -> None:
    key, _, value = option.partition("=")
    with pytest.raises(UsageError) as refused:
        make_plan(wish(gpus="local:2", **{key: value}))
    name = "--" + key.replace("_", "-")
    assert refused.value.message == f"{name} needs rented GPUs"
    assert refused.value.why == "with --gpus local:2 the run stays on this computer"
    assert refused.value.hint == f"leave out {name}, or rent GPUs: --gpus H100:4"
    (tmp_path / "launch.toml").write_text("budget = 5\nmax_price = 3\n")
    assert make_plan(wish(gpus="local:2")).max_cost == 0.0


def test_what_only_a_rented_run_has_waits_in_a_file_and_is_refused_on_the_command_line(
    wish, tmp_path: Path
) -> None:
    (tmp_path / "launch.toml").write_text('infra = ["aws/us-east-1", "k8s/a/context"]\nmax_price = 30\n')
    here = replace(wish(), gpus=None)
    assert make_plan(here).where == "this computer"
    assert here.infra == ("aws/us-east-1", "kubernetes/a/context")
    for option, value in (
        ("max_price", "3"),
        ("budget", "5"),
        ("disk", "100"),
        ("train_gpus", "1"),
        ("infer_gpus", "1"),
        ("infra", "aws"),
        ("copy_rate", "2MB/s"),
    ):
        with pytest.raises(UsageError, match="needs --gpus"):
            make_plan(replace(wish(**{option: value}), gpus=None))
    (tmp_path / "launch.toml").write_text('gpus = "4"\n')
    with pytest.raises(ConfigError, match=r"launch\.toml: '4' is not valid"):
        load({}, environ={}, folder=tmp_path, home=Home(*[tmp_path] * 3))


def test_the_type_may_have_a_name_with_dashes() -> None:
    assert gpus_of("A100-80GB:8") == ("A100-80GB", 8)


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("MI300X", "NVIDIA"),
        ("tpu-v5e", "NVIDIA"),
        ("T4", "bfloat16"),
        ("V100-32GB", "bfloat16"),
        ("GH200", "ARM"),
    ],
)
def test_a_gpu_the_runtime_cannot_use_is_refused_before_it_is_rented(wish, gpu: str, why: str) -> None:
    with pytest.raises(UsageError, match="cannot be used") as refused:
        make_plan(wish(gpus=f"{gpu}:1"), market(Offer("aws", "aws/us-east-1", "kind", gpu, 1, 1.0)))
    assert why in (refused.value.why or "")


@pytest.mark.parametrize("gpu", ["T44", "TT4", "V10", "GH20", "P44", "mi300"])
def test_n07_no_gpu_is_suggested_that_would_be_refused(wish, gpu: str) -> None:
    """Whether catalogs have it, or the table of GPUs' memory."""
    types = {"T4": [1], "V100": [1], "GH200": [1], "P4": [1], "MI300X": [8], "L4": [1]}
    for known in (types, {}):
        with pytest.raises(LaunchError) as refused:
            make_plan(wish(gpus=f"{gpu}:1"), Market(types=known))
        told = f"{refused.value.why} {refused.value.hint}"
        assert not [name for name in types if name != "L4" and re.search(rf"\b{name}\b", told)], told
