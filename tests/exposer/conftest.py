"""Fixtures of all tests here: the product sends no request that its roles do not permit."""

from tests.support.granted import only_granted_requests

__all__ = ["only_granted_requests"]
