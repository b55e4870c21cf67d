"""What holds for every test here: the product asks the API server only for what its permissions allow."""

from tests.support.granted import only_granted_requests

__all__ = ["only_granted_requests"]
