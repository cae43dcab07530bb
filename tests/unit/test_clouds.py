"""launcher/types/clouds.py: with whom there is an account, by places and names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.types.clouds import KNOWN_CLOUDS, has_account, is_variable_of


@pytest.mark.parametrize(
    ("cloud", "variable", "lets_in"),
    [
        ("aws", "AWS_ACCESS_KEY_ID", True), ("aws", "AWS_CA_BUNDLE", False), ("aws", "AWS_REGION", False),
        ("gcp", "GOOGLE_APPLICATION_CREDENTIALS", True), ("gcp", "GOOGLE_API_KEY", False),
        ("azure", "AZURE_API_KEY", False), ("azure", "AZURE_OPENAI_API_KEY", False),
        ("kubernetes", "KUBECONFIG", True),
    ],
)  # fmt: skip
def test_a_model_services_key_or_a_region_is_no_account(
    cloud: str, variable: str, lets_in: bool, tmp_path: Path
) -> None:
    assert has_account(cloud, tmp_path, {variable: "x"}) is lets_in


def test_a_model_services_key_is_not_skypilots_to_see() -> None:
    assert is_variable_of("gcp", "GOOGLE_CLOUD_PROJECT") and not is_variable_of("gcp", "GOOGLE_API_KEY")
    assert is_variable_of("azure", "AZURE_SUBSCRIPTION_ID") and not is_variable_of(
        "azure", "AZURE_OPENAI_API_KEY"
    )


def test_an_ssh_key_alone_is_no_cluster_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    assert not any(has_account(cloud, tmp_path, {}) for cloud in KNOWN_CLOUDS)
    (tmp_path / ".slurm").mkdir()
    assert has_account("slurm", tmp_path, {})
