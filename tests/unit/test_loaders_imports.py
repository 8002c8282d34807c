"""Modules of tokenmill.loaders without their frameworks."""

import importlib
import importlib.util

import pytest


@pytest.mark.parametrize("name", ["torch", "hf", "deepspeed", "lightning", "titan", "grain"])
def test_a_missing_framework_names_the_installation(name: str) -> None:
    framework = "grain" if name == "grain" else "torch"
    if importlib.util.find_spec(framework):
        pytest.skip(f"{framework} is installed")
    with pytest.raises(ModuleNotFoundError, match="run pip install"):
        importlib.import_module(f"tokenmill.loaders.{name}")


def test_the_package_needs_no_framework() -> None:
    assert importlib.import_module("tokenmill.loaders.megatron").describe_data
