"""Which GPUs the trainer and each engine see."""

from __future__ import annotations

from runtime import gpus


def test_trainer_and_engines_stand_apart_where_there_are_enough() -> None:
    assert gpus.assign_gpus(["0", "1", "2", "3"], 2, 2) == (["0", "1"], [["2"], ["3"]])


def test_one_gpu_is_shared() -> None:
    assert gpus.assign_gpus(["5"], 1, 1) == (["5"], [["5"]])


def test_what_is_visible_is_as_cuda_says() -> None:
    assert gpus.visible_gpus({gpus.VISIBLE: "4,5"}) == ["4", "5"]
    assert gpus.visible_gpus({gpus.VISIBLE: ""}) == []
    assert gpus.visible_gpus({gpus.VISIBLE: "-1"}) == [], "how people hide them all"
    assert gpus.visible_gpus({gpus.VISIBLE: "2, GPU-4a1b,-1,3"}) == ["2", "GPU-4a1b"], (
        "CUDA stops at what is none"
    )
