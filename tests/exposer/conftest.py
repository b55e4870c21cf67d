"""What holds for every test here: the product asks the API server for nothing it has no right to."""

from tests.support.granted import only_granted_requests

__all__ = ["only_granted_requests"]
