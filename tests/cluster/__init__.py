"""Tests on a real kubelet; they run inside the test bed."""
