"""Fixtures of the simulation's tests."""

import pytest

import mimicfl as mf


@pytest.fixture
def names():
    """Names registered by a test are gone after it."""
    registries = [mf.models.MODELS, mf.algorithms.ALGORITHMS, mf.availability.PATTERNS]
    before = [dict(registry.factories) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.factories.clear()
        registry.factories.update(known)
